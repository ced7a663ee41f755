"""Fine-tuning on chats against transformers, which sees one conversation at a time.

The reference takes its masks from transformers' template, its loss from one conversation after the
other, and torch's AdamW; only which conversations a step holds is read from our batches.
"""

import json
import random
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_train.config import Config
from moe_train.data import prepare
from moe_train.model import decays
from moe_train.training import open_splits
from moe_train.training.batches import BatchPlan, SampleReader
from moe_train.training.sources import DataIdentity, source_shares
from ranktest.fixtures import one_thread as one_thread

STEPS = 20
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYOUTS = {"one process": (), "pp=2 x ep=2": ("parallel.pp=2", "parallel.ep=2")}
Talk = list[dict[str, Any]]


def talks() -> list[Talk]:
    """All different: several turns, weights of 0, empty answers, and none to train on at all."""
    rng = random.Random(5)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    made = []
    for number in range(60):
        talk: Talk = [{"role": "system", "content": f"No. {number}"}] if number % 3 == 0 else []
        for turn in range(1 + number % 3):
            talk.append({"role": "user", "content": words(5)})
            answer = {"role": "assistant", "content": "" if number % 7 == 3 else words(8)}
            if number % 5 == turn or number % 10 == 9:
                answer["weight"] = 0
            talk.append(answer)
        made.append([{"role": "user", "content": words(6)}] if number % 15 == 4 else talk)
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer, as transformers saves them."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.1,
        router_aux_loss_coef=0.0,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def masked_talks(folder: Path) -> list[tuple[list[int], list[bool]]]:
    """Ids and targets of each conversation, by transformers' template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for talk in talks():
        plain = [{key: m[key] for key in ("role", "content")} for m in talk]
        out = tokenizer.apply_chat_template(
            plain, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        weights = iter([m.get("weight", 1) for m in talk if m["role"] == "assistant"])
        mask: list[bool] = []
        for is_turn, run in groupby(out["assistant_masks"]):
            kept = bool(is_turn and next(weights))
            mask += [kept for _ in run]
        found.append((out["input_ids"], mask))
    return found


def talks_of_steps(config: Config, known: list[tuple[list[int], list[bool]]]) -> list[list[int]]:
    """Which conversations each step holds."""
    prepared = prepare(config)
    split, _ = open_splits(config, prepared)
    size = config.train.global_batch_size
    plan = BatchPlan(global_batch_size=size, num_microbatches=1, sample_rank=0, num_sample_ranks=1)
    data = DataIdentity(
        fingerprint=prepared.fingerprint,
        sequence_length=config.data.sequence_length,
        seed=config.train.seed,
        sources=source_shares(prepared, split),
    )
    reader, steps = SampleReader(split, data, plan), []
    for step in range(STEPS):
        (batch,) = reader.read(step * size).batches
        held = []
        for ids, positions in zip(
            batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True
        ):
            starts = [place for place, position in enumerate(positions) if position == 0]
            used = sum(position >= 0 for position in positions)
            for start, end in zip(starts, [*starts[1:], used], strict=True):
                own = ids[start:end]
                held += [n for n, (talk, _) in enumerate(known) if _is_talk(own, talk)]
        assert len(held) == int((batch.position_ids == 0).sum()), "a conversation is not whole"
        steps.append(held)
    return steps


def _is_talk(row: list[int], talk: list[int]) -> bool:
    """A row may lack the last token, which predicts nothing, or have one more that ends it."""
    return row[: len(talk)] == talk[: len(row)] and abs(len(row) - len(talk)) <= 1


def reference_losses(
    folder: Path,
    steps: list[list[int]],
    known: list[tuple[list[int], list[bool]]],
    config: Config,
    frozen: Callable[[str], bool] = lambda _: False,
) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(not frozen(name))
    trained = {name: p for name, p in named.items() if p.requires_grad}
    settings = config.optimizer
    groups = [
        {
            "params": [p for n, p in trained.items() if decays(n, p.shape) == decayed],
            "weight_decay": settings.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps
    )
    losses = []
    for held in steps:
        count = sum(sum(known[n][1][1:]) for n in held)
        total = 0.0
        optimizer.zero_grad()
        for ids, mask in (known[n] for n in held):
            if not any(mask[1:]):
                continue
            tokens = torch.tensor([ids])
            wanted = torch.tensor(mask[1:])
            logits = model(tokens, use_cache=False).logits[0, :-1][wanted]
            loss = F.cross_entropy(logits, tokens[0, 1:][wanted], reduction="sum") / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained.values(), settings.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.fixture
def chat_job(
    source: Path, configure: Callable[..., Config], tmp_path: Path
) -> Callable[..., Config]:
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks()))
    return lambda *overrides: configure(
        f"model.init_from={source}",
        "model.config_file=",
        "tokenizer.vocab_size=",
        f"data.corpus={data}",
        "data.kind=chat",
        "data.sequence_length=96",
        "data.num_workers=1",
        "train.global_batch_size=4",
        "optimizer.decay=constant",
        "optimizer.warmup_steps=0",
        *overrides,
    )


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
def test_twenty_steps_of_fine_tuning_equal_those_of_transformers(
    source: Path,
    chat_job: Callable[..., Config],
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
    tmp_path: Path,
    packing: str,
) -> None:
    known = masked_talks(source)
    job = chat_job(f"data.packing={packing}")
    steps = talks_of_steps(job, known)
    seen = {n for held in steps for n in held}
    assert {"", None} & {talks()[n][-1]["content"] or None for n in seen}, "no empty answer"
    assert any(not any(known[n][1]) for n in seen), "no conversation without a target"
    assert any(m.get("weight") == 0 for n in seen for m in talks()[n])
    sizes = [len(held) for held in steps]
    assert set(sizes) == {4} if packing == "pad" else max(sizes) > 6
    expected = reference_losses(source, steps, known, job)
    assert expected[-1] < 0.8 * expected[0], "the reference did not learn"
    for name, layout in LAYOUTS.items():
        output = tmp_path / name.replace(" ", "_")
        train(chat_job(f"data.packing={packing}", *layout, f"train.output_dir={output}"))
        found = losses(output)
        for step, loss in enumerate(expected, start=1):
            assert abs(found[step] - loss) <= 1e-5, f"{name}, step {step}: {found[step]} and {loss}"


def test_frozen_parameters_train_as_with_requires_grad_false_in_transformers(
    source: Path,
    chat_job: Callable[..., Config],
    train: Callable[..., None],
    losses: Callable[[Path], dict[int, float]],
    tmp_path: Path,
) -> None:
    known = masked_talks(source)
    job = chat_job('train.trainable=["*.self_attn.*", "lm_head.weight", "*.1.mlp.experts.*"]')
    steps = talks_of_steps(job, known)

    def frozen(name: str) -> bool:
        return not any(part in name for part in ("self_attn", "lm_head", ".1.mlp.experts."))

    expected = reference_losses(source, steps, known, job, frozen)
    train(job)
    found = losses(tmp_path / "run")
    assert [found[n] for n in range(1, STEPS + 1)] == pytest.approx(expected, abs=1e-5)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (source, tmp_path / "run" / f"checkpoint-{STEPS}")
    )
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == frozen(name), name

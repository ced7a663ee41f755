"""A run that starts from a model goes on with its tokenizer, and transformers opens the result."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_train import load_model
from moe_train.config import Config
from moe_train.tokenization import load_tokenizer

transformers = pytest.importorskip("transformers")

Configure = Callable[..., Config]
Train = Callable[..., None]
Losses = Callable[[Path], dict[int, float]]
SMALL = {"num_hidden_layers": 2, "router_aux_loss_coef": 0.0, "vocab_size": 300}
BRIEF = ("tokenizer.vocab_size=300", "train.max_steps=2")


@pytest.fixture
def source(configure: Configure, train: Train, tmp_path: Path) -> Callable[..., Path]:
    """`source(**changes of config.json)`: a model trained for two steps on Python's source."""

    def make(**changes: object) -> Path:
        config = configure(
            *BRIEF, f"train.output_dir={tmp_path / 'first'}", model_changes={**SMALL, **changes}
        )
        train(config)
        return tmp_path / "first" / "checkpoint-2"

    return make


def test_the_first_loss_is_that_of_the_source_with_its_own_tokenizer(
    source: Callable[..., Path],
    configure: Configure,
    train: Train,
    losses: Losses,
    tmp_path: Path,
) -> None:
    folder = source()
    texts = ["Der Hund frisst. " * 60, "Die Katze schläft nicht. " * 50]
    other = tmp_path / "other"
    other.mkdir()
    for number, text in enumerate(texts):
        (other / f"{number}.txt").write_text(text, encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    streams = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # The whole training split is one step; which document is held out is a hash of its name.
    expected = {}
    for ids in streams:
        count = (len(ids) - 1) // 32
        windows = torch.tensor([ids[n * 32 : n * 32 + 33] for n in range(count)])
        with torch.no_grad():
            logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        expected[count] = loss.item()
    seen = []
    for count in expected:
        config = configure(
            f"model.init_from={folder}",
            f"data.corpus={other}",
            "data.extensions=.txt",
            "train.max_steps=1",
            "train.gradient_accumulation_steps=1",
            f"train.global_batch_size={count}",
            f"train.output_dir={tmp_path / str(count)}",
        )
        train(config)
        seen.append(abs(losses(tmp_path / str(count))[1] - expected[count]))
    assert min(seen) < 1e-5
    checkpoint = tmp_path / str(count) / "checkpoint-1"
    for name in load_tokenizer(folder).files:
        assert (checkpoint / name).read_bytes() == (folder / name).read_bytes()


def test_data_and_checkpoint_agree_about_the_end_token(source: Callable[..., Path]) -> None:
    folder = source(eos_token_id=2, bos_token_id=1)  # 2 is '"' in a trained tokenizer
    ours = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    model = transformers.AutoConfig.from_pretrained(folder)
    assert ours.eos_token_ids == (0,) == (generation.eos_token_id,)
    assert (theirs.eos_token_id, model.eos_token_id) == (0, 0)
    assert theirs.convert_ids_to_tokens(2) == '"' == ours.decode([2, 0])
    assert theirs.decode([2, 0], skip_special_tokens=True) == '"'


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_grow_the_model_in_every_layout(
    source: Callable[..., Path],
    configure: Configure,
    train: Train,
    losses: Losses,
    tmp_path: Path,
    tied: bool,
) -> None:
    folder = source(tie_word_embeddings=tied)
    keys = (
        f"model.init_from={folder}",
        'tokenizer.new_tokens=["<think>", "</think>"]',
        "tokenizer.pad_vocab_multiple=64",
        "train.gradient_accumulation_steps=1",
        "checkpoint.interval_steps=1",
    )
    for name, layout in (("one", ()), ("four", ("parallel.pp=2", "parallel.ep=2"))):
        train(configure(*keys, *layout, f"train.output_dir={tmp_path / name}", "train.max_steps=2"))
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert one == pytest.approx(four, abs=1e-5)
    train(
        configure(*keys, f"train.output_dir={tmp_path / 'again'}", "train.max_steps=2"),
        str(tmp_path / "four" / "checkpoint-1"),
    )
    assert losses(tmp_path / "again")[2] == pytest.approx(one[2], abs=1e-5)
    checkpoint = tmp_path / "four" / "checkpoint-2"
    assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] == 320
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = theirs("<think>x</think>")["input_ids"]
    assert ids == load_tokenizer(checkpoint).encode_prompt("<think>x</think>")
    assert (ids[0], ids[-1]) == (300, 301)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    stage = load_model(checkpoint)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        hidden, _ = stage.hidden_states(tokens, torch.arange(len(ids))[None])
        assert torch.allclose(stage.logits(hidden), model(tokens).logits, atol=1e-5)


def test_new_rows_begin_as_the_mean(
    source: Callable[..., Path], configure: Configure, train: Train, tmp_path: Path
) -> None:
    folder = source()
    config = configure(
        f"model.init_from={folder}",
        "tokenizer.pad_vocab_multiple=64",
        f"train.output_dir={tmp_path / 'still'}",
        "train.max_steps=1",
        "optimizer.lr=1e-30",
        "optimizer.weight_decay=0",
    )
    train(config)
    before, after = load_model(folder), load_model(tmp_path / "still" / "checkpoint-1")
    for old, new in (
        (before.model.embed_tokens.weight, after.model.embed_tokens.weight),
        (before.lm_head.weight, after.lm_head.weight),
    ):
        assert torch.equal(new[:300], old)
        assert torch.allclose(new[300:], old.mean(0).expand(20, -1))

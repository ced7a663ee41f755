"""A pretrained folder of every family, fine-tuned on chats, is the same in transformers.

Each folder is what `save_pretrained` writes, with a tokenizer of the family's kind: the two kinds
of byte-pair encoding, its special tokens and its manner of chat template.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from moe_train.config import Config, load_config
from moe_train.generation import (
    Completion,
    GenerationOptions,
    ModelOptions,
    generate_all,
    load_model,
    open_model,
)
from moe_train.tokenization import load_tokenizer
from ranktest.fixtures import one_thread as one_thread

STEPS = 20
TALKS = [
    ("Are you well?", "Yes, I am."),
    ("Is it late?", "Yes, it is."),
    ("¿Qué tal? 😀", "Yes, I am."),
    ("Count.", "one two three four five six seven eight nine ten " * 9),
]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), 1),
    "router_aux_loss_coef": 0.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a family writes a conversation, and what its folder says.

    `turn`: the template of one message; `prompt`: what asks for an answer. The first of `ends` ends
    an answer.
    """

    turn: str
    prompt: str
    ends: tuple[str, ...]
    begin: str | None = None
    pad: str | None = None
    others: tuple[str, ...] = ()
    is_byte_level: bool = True
    values: dict[str, Any]

    @property
    def template(self) -> str:
        begin = "{{ bos_token }}" if self.begin else ""
        return (
            f"{begin}{{% for m in messages %}}{self.turn}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{self.prompt}{{% endif %}}"
        )


def by_role(user: str, assistant: str) -> str:
    return f"{{% if m.role == 'user' %}}{user}{{% else %}}{assistant}{{% endif %}}"


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML_PROMPT = "<|im_start|>assistant\n"
SENTENCE_END = "<｜end▁of▁sentence｜>"
KINDS: dict[str, Kind] = {
    "mixtral": Kind(
        turn=by_role("[INST] {{ m.content }} [/INST]", " {{ m.content }}</s>"),
        prompt="",
        ends=("</s>",),
        begin="<s>",
        others=("<unk>",),
        is_byte_level=False,
        values={},
    ),
    "olmoe": Kind(
        turn=by_role(
            "<|user|>\n{{ m.content }}\n", "<|assistant|>\n{{ m.content }}<|endoftext|>\n"
        ),
        prompt="<|assistant|>\n",
        ends=("<|endoftext|>",),
        pad="<|padding|>",
        values={"num_key_value_heads": 4},
    ),
    "qwen2_moe": Kind(
        turn=CHATML,
        prompt=CHATML_PROMPT,
        ends=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        others=("<|im_start|>",),
        values={},
    ),
    "qwen3_moe": Kind(
        turn=CHATML,
        prompt=CHATML_PROMPT,
        ends=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
        others=("<|im_start|>", "<think>", "</think>"),
        values={"head_dim": 16},
    ),
    "deepseek_v2": Kind(
        turn=by_role("User: {{ m.content }}\n\n", "Assistant: {{ m.content }}" + SENTENCE_END),
        prompt="Assistant:",
        ends=(SENTENCE_END,),
        begin="<｜begin▁of▁sentence｜>",
        values={**LATENT, "topk_method": "group_limited_greedy", "head_dim": 8},
    ),
    "deepseek_v3": Kind(
        turn=by_role("<｜User｜>{{ m.content }}", "<｜Assistant｜>{{ m.content }}" + SENTENCE_END),
        prompt="<｜Assistant｜>",
        ends=(SENTENCE_END,),
        begin="<｜begin▁of▁sentence｜>",
        others=("<｜User｜>", "<｜Assistant｜>", "<｜▁pad▁｜>"),
        pad="<｜▁pad▁｜>",
        values={**LATENT, "head_dim": 8, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe": Kind(
        turn=by_role("<|user|>\n{{ m.content }}", "<|assistant|>\n{{ m.content }}<|endoftext|>"),
        prompt="<|assistant|>\n",
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        others=("[gMASK]", "<sop>", "<|assistant|>"),
        pad="<|endoftext|>",
        values={"use_qk_norm": True, "head_dim": 16, "num_nextn_predict_layers": 0},
    ),
    "ernie4_5_moe": Kind(
        turn=by_role("User: {{ m.content }}\n", "Assistant: {{ m.content }}<|end_of_sentence|>"),
        prompt="Assistant:",
        ends=("<|end_of_sentence|>",),
        begin="<|begin_of_sentence|>",
        others=("<unk>",),
        is_byte_level=False,
        values={"moe_layer_start_index": 0, "tie_word_embeddings": True},
    ),
    "gpt_oss": Kind(
        turn=by_role(
            "<|start|>user<|message|>{{ m.content }}<|end|>",
            "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
            "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}",
        ),
        prompt="<|start|>assistant",
        ends=("<|return|>", "<|call|>"),
        pad="<|endoftext|>",
        others=("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
        values={"head_dim": 16, "sliding_window": 16},
    ),
}


def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    """Trained on the talks; with byte fallback it is as sentencepiece's BPE becomes a fast one."""
    special = dict.fromkeys(
        name for name in (*kind.others, kind.begin, *kind.ends, kind.pad) if name is not None
    )
    texts = [text for talk in TALKS for text in talk] * 4
    if kind.is_byte_level:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1),
            ]
        )
        alphabet, first = [], [f"<0x{byte:02X}>" for byte in range(256)]
    # What no text of the talks has is left to the bytes.
    known = [text for text in texts if kind.is_byte_level or text.isascii()]
    trainer = BpeTrainer(
        vocab_size=len(special) + (340 if kind.is_byte_level else 310),
        special_tokens=[*special, *first],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(known, trainer)
    if first:  # bytes are tokens, but not special ones
        values = json.loads(tokenizer.to_str())
        values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] not in first]
        tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=kind.begin,
        eos_token=kind.ends[0],
        pad_token=kind.pad,
        chat_template=kind.template,
        clean_up_tokenization_spaces=False,
    )


def save_source(model_type: str, folder: Path) -> None:
    """The pretrained folder."""
    kind = KINDS[model_type]
    tokenizer = tokenizer_of(kind)
    tokenizer.save_pretrained(folder)
    known = AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    ends = [tokenizer.convert_tokens_to_ids(name) for name in kind.ends]
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(11)
    config = AutoConfig.for_model(
        model_type, **{**sizes, **kind.values, **ids, "vocab_size": len(tokenizer)}
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)


def job_of(folder: Path, source: Path) -> Config:
    data = folder / "talks.jsonl"
    lines = [
        {
            "messages": [
                {"role": r, "content": t} for r, t in zip(("user", "assistant"), talk, strict=True)
            ]
        }
        for talk in (*TALKS[:3] * 4, TALKS[3]) * 4
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    toml = folder / "job.toml"
    toml.write_text(
        f"""
[model]
init_from = "{source}"
[data]
corpus = ["{data}"]
kind = "chat"
sequence_length = 128
validation_fraction = 0.1
cache_dir = "{folder / "cache"}"
num_workers = 1
[train]
output_dir = "{folder / "run"}"
max_steps = {STEPS}
global_batch_size = 4
validation_sequences = 4
device = "cpu"
threads_per_rank = 1
[optimizer]
lr = 0.03
warmup_steps = 2
[log]
tensorboard = false
plots = false
progress = "off"
"""
    )
    return load_config(toml)


@pytest.mark.parametrize("model_type", KINDS)
def test_a_fine_tuned_model_is_the_same_in_transformers(
    model_type: str, tmp_path: Path, train: Callable[..., None], losses: Callable[..., Any]
) -> None:
    source = tmp_path / "source"
    save_source(model_type, source)
    train(job_of(tmp_path, source))
    found = losses(tmp_path / "run")
    assert len(found) == STEPS and found[STEPS] < 0.5 * found[1]
    checkpoint = tmp_path / "run" / f"checkpoint-{STEPS}"

    theirs, ours = AutoTokenizer.from_pretrained(checkpoint), load_tokenizer(checkpoint)
    before = AutoTokenizer.from_pretrained(source)
    texts = ["Yes, it is. ", f"a{KINDS[model_type].ends[0]}b", "naïve 😀\n\n  x", ""]
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ids == before(text)["input_ids"] == ours.encode_prompt(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    talk = [{"role": "user", "content": TALKS[0][0]}]
    prompt = theirs.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(talk, add_generation_prompt=True) == prompt
    whole = [*talk, {"role": "assistant", "content": TALKS[0][1]}]
    ids = theirs.apply_chat_template(whole, return_dict=True)["input_ids"]
    encoded = ours.encode_chat(whole)
    assert encoded.ids.tolist() == ids
    answer = theirs.decode([i for i, kept in zip(ids, encoded.trained, strict=True) if kept])
    assert answer.strip().endswith(f"Yes, I am.{KINDS[model_type].ends[0]}")

    asked = [theirs(prompt, add_special_tokens=False)["input_ids"]]
    asked += [theirs(text)["input_ids"] for text in ("one two", "is it seven eight nine")]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    answers = in_one_batch(checkpoint, asked)
    stage = load_model(checkpoint)
    for ids, answer in zip(asked, answers, strict=True):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            hidden, _ = stage.hidden_states(tokens, torch.arange(len(ids))[None])
            torch.testing.assert_close(
                stage.logits(hidden), model(tokens).logits, rtol=1e-4, atol=1e-5
            )
            wanted = model.generate(tokens, max_new_tokens=64, do_sample=False)[0, len(ids) :]
        assert list(answer.token_ids) == wanted.tolist()
    print(
        model_type,
        found[1],
        found[STEPS],
        [(a.finish_reason, len(a.token_ids), a.text) for a in answers],
    )
    assert answers[0].finish_reason == "end", "the model has not learnt to stop"


def in_one_batch(checkpoint: Path, prompts: list[list[int]]) -> list[Completion]:
    options = GenerationOptions(max_new_tokens=64)
    model, tokenizer = open_model(checkpoint, ModelOptions(), None), load_tokenizer(checkpoint)
    (found,) = generate_all(model, tokenizer, prompts, options)
    return found

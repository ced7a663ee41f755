"""A small job that every end-to-end test can vary: tiny decoder, real text, seconds to run."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_train.config import Config, load_config
from moe_train.jobs.job import check as check_job
from moe_train.jobs.job import train as run_job
from moe_train.rank import RankContext
from moe_train.tokenization.bpe import train_bpe
from ranktest import run_ranks

TINY_MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "intermediate_size": 48,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "router_aux_loss_coef": 0.01,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

TOML = """
[model]
config_file = "config.json"
[data]
corpus = ["corpus"]
sequence_length = 32
validation_fraction = 0.2
cache_dir = "CACHE"
[tokenizer]
vocab_size = 512
train_bytes = 200000
[parallel]
timeout_s = 60
[train]
output_dir = "run"
seed = 3
max_steps = 20
global_batch_size = 16
gradient_accumulation_steps = 2
validation_interval_steps = 1000
validation_sequences = 20
device = "cpu"
threads_per_rank = 1
[optimizer]
lr = 0.003
warmup_steps = 3
[log]
tensorboard = false
plots = false
progress = "off"
"""


@pytest.fixture(scope="session")
def corpus_files() -> list[Path]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = ["abc", "bisect", "calendar", "contextlib", "copy", "csv", "dis", "enum", "heapq", "io"]
    return [stdlib / f"{name}.py" for name in [*names, "queue", "random", "shlex", "textwrap"]]


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: the same corpus is tokenized once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def job(tmp_path: Path, corpus_files: list[Path], cache_dir: Path) -> Callable[..., Path]:
    """Write config.json, corpus and job.toml into `tmp_path`; return the TOML's path."""

    def write(**model_changes: object) -> Path:
        corpus = tmp_path / "corpus"
        corpus.mkdir(exist_ok=True)
        for source in corpus_files:
            (corpus / source.name).write_bytes(source.read_bytes())
        (tmp_path / "config.json").write_text(json.dumps({**TINY_MODEL, **model_changes}))
        toml = tmp_path / "job.toml"
        toml.write_text(TOML.replace("CACHE", str(cache_dir)))
        return toml

    return write


@pytest.fixture
def configure(job: Callable[..., Path]) -> Callable[..., Config]:
    """`configure("parallel.pp=2", model_changes={...})` returns the loaded job."""

    def load(*overrides: str, model_changes: dict[str, object] | None = None) -> Config:
        return load_config(job(**(model_changes or {})), overrides)

    return load


@pytest.fixture
def train() -> Callable[..., None]:
    """`train(config, resume="")` runs a job on forked ranks, which need not import torch again."""

    def run(config: Config, resume: str = "") -> None:
        check_job(config, resume)
        run_ranks(
            lambda rank, _: run_job(config, resume, RankContext()), config.world_size, timeout_s=120
        )

    return run


@pytest.fixture
def losses() -> Callable[[Path], dict[int, float]]:
    """`losses(output_dir)` by step."""

    def read(folder: Path) -> dict[int, float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    return read


TEXTS = ["def self return import value\n" * 9, "hello wörld 𝄞 é for in None " * 9]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAMILY_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 0,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "head_dim": 6,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 9,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "gpt_oss": {"sliding_window": 3},
    "mixtral": {"sliding_window": 4},
    "qwen3_moe": {"norm_topk_prob": True},
}


@pytest.fixture
def save_family() -> Callable[..., PreTrainedModel]:
    """`save_family("mixtral", folder, end=7)`: a random model of a family and a tokenizer with a
    chat template, as `save_pretrained` writes them; tokens 0 and `end` end a text.
    """
    return _save_family


def _save_family(model_type: str, folder: Path, end: int = 0) -> PreTrainedModel:
    """A random model of a family with a tokenizer, as `save_pretrained` writes them."""
    extra = FAMILIES[model_type]
    ends = [0, end] if end else 0
    torch.manual_seed(3)
    config = AutoConfig.for_model(model_type, **{**FAMILY_SIZES, **extra, "eos_token_id": ends})
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    for name, content in train_bpe(TEXTS, vocab_size=300).items():
        if name != "generation_config.json":
            (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return model

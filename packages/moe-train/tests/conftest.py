"""A tiny decoder and a small corpus, for every test that builds or runs a job."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_train.config import Config, load_config
from moe_train.data import Batch
from moe_train.jobs.job import check, train
from moe_train.rank import RankContext
from ranktest import run_ranks
from ranktest.fixtures import one_thread as one_thread
from ranktest.fixtures import seed as seed

TINY_MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "router_aux_loss_coef": 0.0,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
TOML = """
[model]
config_file = "config.json"
[data]
corpus = ["CORPUS"]
sequence_length = 12
validation_fraction = 0.2
cache_dir = "CACHE"
[tokenizer]
vocab_size = 300
[parallel]
timeout_s = 60
[train]
output_dir = "run"
max_steps = 4
global_batch_size = 12
gradient_accumulation_steps = 2
validation_interval_steps = 1000
validation_sequences = 7
device = "cpu"
threads_per_rank = 1
[optimizer]
lr = 0.01
eps = 1e-4
max_grad_norm = 0.5
[log]
tensorboard = false
plots = false
progress = "off"
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short files of words."""
    folder = tmp_path_factory.mktemp("corpus")
    words = ["def", "return", "import", "self", "value", "None", "for", "in", "é"]
    for index in range(12):
        rng = random.Random(index)
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(20)]
        (folder / f"f{index}.py").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, so that the corpus is tokenized once."""
    # What the constructor of AdamW imports is imported here once, and not in every forked rank.
    torch.optim.AdamW([torch.zeros(1)])
    return tmp_path_factory.mktemp("cache")


def write_job(folder: Path, corpus: Path, cache_dir: Path, **model_changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY_MODEL, **model_changes}))
    toml = folder / "job.toml"
    toml.write_text(TOML.replace("CORPUS", str(corpus)).replace("CACHE", str(cache_dir)))
    return toml


@pytest.fixture
def configure(tmp_path: Path, corpus: Path, cache_dir: Path) -> Callable[..., Config]:
    """`configure("parallel.pp=2", num_experts=4)` loads the tiny job with overrides and changes
    of its config.json; the job lies in `tmp_path` and writes to `tmp_path / "run"`.
    """

    def load(*overrides: str, **model_changes: object) -> Config:
        return load_config(write_job(tmp_path, corpus, cache_dir, **model_changes), overrides)

    return load


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache_dir: Path) -> Path:
    """The output folder of a run of two steps, with checkpoint-2. Only to be read."""
    folder = tmp_path_factory.mktemp("trained")
    config = load_config(write_job(folder, corpus, cache_dir), ["train.max_steps=2"])
    check(config, "")
    run_ranks(lambda *_: train(config, "", RankContext()), 1)
    return folder / "run"


_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_HEADS, "num_local_experts": 4, "sliding_window": 7},
    "qwen2_moe": {
        **_HEADS,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "shared_expert_intermediate_size": 8,
        "attention_dropout": 0.2,
        "tie_word_embeddings": True,
        "vocab_size": 303,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "attention_dropout": 0.2,
        "num_nextn_predict_layers": 2,
    },
    "gpt_oss": {
        **_HEADS,
        "num_local_experts": 4,
        "sliding_window": 5,
        "num_hidden_layers": 4,
        "vocab_size": 303,
    },
}
_BALANCE = {
    "mixtral": ("moe.aux_loss_scope=sequence", "moe.z_loss_coef=0.01"),
    "qwen2_moe": ("moe.capacity_factor=1.0", "moe.token_drop_policy=position"),
    "deepseek_v3": ("moe.aux_loss_scope=sequence", "moe.update_expert_bias=true"),
    "gpt_oss": ("moe.aux_loss_scope=microbatch",),
}


@pytest.fixture
def of_family() -> Callable[[str], tuple[tuple[str, ...], dict[str, Any]]]:
    """`of_family("gpt_oss")`: keys that balance the experts of a family's decoder, and what is its
    own in config.json: heads, windows, latents, dropout, ties, shared experts among the families.
    """
    return lambda name: (_BALANCE[name], {"model_type": name, **_FAMILIES[name]})


@pytest.fixture
def random_batches() -> Callable[..., list[Batch]]:
    """`random_batches(config, step, data_rank, num_data_ranks)`: a rank's microbatches of a step.

    The global batch depends on the step alone. Each sequence holds two documents.
    """

    def make(config: Config, step: int, data_rank: int = 0, num_data_ranks: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        rows, length = config.train.global_batch_size, config.data.sequence_length
        tokens = torch.randint(1, 300, (rows, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[:, 6] = -100
        positions = torch.arange(length).repeat(rows, 1)
        positions[:, 7:] -= 7
        microbatches = torch.arange(rows).view(config.train.gradient_accumulation_steps, -1)
        own = [part.chunk(num_data_ranks)[data_rank] for part in microbatches]
        return [
            Batch(input_ids=tokens[r, :-1], labels=labels[r], position_ids=positions[r])
            for r in own
        ]

    return make


@pytest.fixture
def ragged_batches() -> Callable[..., list[Batch]]:
    """As `random_batches`, of rows of 11 places, each with other documents: two, one and padding,
    at borders and beside them.
    """

    def make(config: Config, step: int, sample_rank: int, num_sample_ranks: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        rows, length = config.train.global_batch_size, config.data.sequence_length
        tokens = torch.randint(1, 300, (rows, length + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        positions = torch.arange(length).repeat(rows, 1)
        for row in range(rows):
            second, end = 1 + (row + step) % 8, 3 + (5 * row + step) % 9
            positions[row, second:] -= second
            labels[row, second - 1] = -100
            positions[row, end:], labels[row, end - 1 :] = -1, -100
        microbatches = torch.arange(rows).view(config.train.gradient_accumulation_steps, -1)
        own = [part.chunk(num_sample_ranks)[sample_rank] for part in microbatches]
        return [
            Batch(input_ids=tokens[r, :-1], labels=labels[r], position_ids=positions[r])
            for r in own
        ]

    return make


class StepHook(RankContext):
    """Calls a function when a step is finished, before the save that follows."""

    def __init__(self, hook: Callable[[int], None]) -> None:
        super().__init__()
        self.hook = hook

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "step" and hasattr(self, "hook"):
            self.hook(int(value))  # type: ignore[call-overload]


@pytest.fixture
def step_hook() -> Callable[[Callable[[int], None]], RankContext]:
    """Makes a context that calls a function when a step is finished."""
    return StepHook

"""How far the forecast of each rank's peak of memory is from what the rank allocates.

    python benchmarks/moe_train_forecast.py [--only recomputed]

Four families of decoders, with and without recompute, on one process and on pp=2 x ep=2. Every rank
of each job is forecast in one process on tensors without memory, as `moe-train plan` does, and then
run: real processes with gloo, real tensors, the same recorder. In the real runs tokens are made to
choose experts evenly, which is what the forecast assumes and says; all else is theirs. What a
thread of comm-collectives receives from another stage the recorder is told of when it is read.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_alloc import TraceEvent
from gpu_alloc.torch import TraceRecorder
from gpu_alloc.trace import summarize
from moe_pipeline.executor import edges
from moe_pipeline.router import top_k
from moe_train.config import Config, load_config
from moe_train.jobs.rank_alone import record_alone, record_steps
from moe_train.parallel import start
from ranktest import run_ranks

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MLA = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
}
FAMILIES = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 6, "router_aux_loss_coef": 0.001},
    "mixtral": {"num_local_experts": 4, "router_aux_loss_coef": 0.02},
    "deepseek_v3": _MLA,
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
}
TOML = """
[model]
config_file = "config.json"
[data]
sequence_length = 64
[parallel]
timeout_s = 60
[train]
output_dir = "run"
max_steps = 4
global_batch_size = 8
gradient_accumulation_steps = 2
device = "cpu"
[optimizer]
lr = 0.01
"""
LAYOUTS = {"1 process": [], "pp=2 x ep=2": ["parallel.pp=2", "parallel.ep=2"]}
RECOMPUTE = {"kept": [], "recomputed": ['train.recompute="layers"']}


def job(folder: Path, family: str, overrides: list[str]) -> Config:
    model = {"model_type": family} | _COMMON | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "job.toml").write_text(TOML)
    return load_config(folder / "job.toml", overrides)


@contextmanager
def _evenly() -> Iterator[None]:
    """Choices as the forecast assumes them: token t takes experts t, t + 1, ..."""

    def choose(scores_TE: torch.Tensor, config: Any) -> torch.Tensor:
        tokens, experts = scores_TE.shape
        choices = torch.arange(config.num_experts_per_tok)
        return (torch.arange(tokens).view(-1, 1) + choices) % experts

    before = top_k.choose_experts
    top_k.choose_experts = choose  # type: ignore[assignment]
    try:
        yield
    finally:
        top_k.choose_experts = before


@contextmanager
def _told_of_messages() -> Iterator[None]:
    """What other threads have received is recorded when it is read."""
    recorders: list[TraceRecorder] = []
    enter, unpack = TraceRecorder.__enter__, edges.unpack

    def entered(self: TraceRecorder) -> TraceRecorder:
        recorders.append(self)
        return enter(self)

    def unpacked(packed: Any) -> Any:
        found = unpack(packed)
        if isinstance(found, tuple):
            recorders[-1].add(found[1].tensors)
        return found

    TraceRecorder.__enter__, edges.unpack = entered, unpacked  # type: ignore[method-assign]
    try:
        yield
    finally:
        TraceRecorder.__enter__, edges.unpack = enter, unpack  # type: ignore[method-assign]


def real(config: Config) -> list[TraceEvent]:
    """What this rank allocates."""
    torch.set_num_threads(1)
    with _evenly(), _told_of_messages():
        return record_steps(config, start(config)).events


def forecasts(configs: list[Config]) -> list[list[int]]:
    """The forecast peak of every rank of every job, all in one process."""

    def peaks(*_: int) -> list[list[int]]:
        return [
            [summarize(record_alone(c, r).events).peak_live_bytes for r in range(c.world_size)]
            for c in configs
        ]

    # A process of its own: autograd's threads, which fake tensors start, do not survive a fork.
    return run_ranks(peaks, 1, init=False, timeout_s=1800)[0]  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="jobs whose name has this")
    only = parser.parse_args().only
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for family in FAMILIES:
            place = Path(folder) / family
            place.mkdir()
            for layout, where in LAYOUTS.items():
                for kept, how in RECOMPUTE.items():
                    name = f"{family}, {kept}, {layout}"
                    if only in name:
                        jobs[name] = job(place, family, [*where, *how])
        found = forecasts(list(jobs.values()))
        for (name, config), peaks in zip(jobs.items(), found, strict=True):
            traces: Any = run_ranks(lambda *_, c=config: real(c), config.world_size, timeout_s=300)
            for rank, (peak, trace) in enumerate(zip(peaks, traces, strict=True)):
                allocated = summarize(trace).peak_live_bytes
                errors.append(abs(peak - allocated) / allocated)
                print(f"{name}, rank {rank}: forecast {peak}, allocated {allocated}", flush=True)
    record = {"figure": "moe_train_forecast_error", "value": max(errors), "unit": "of the peak"}
    print(json.dumps(record | {"low": min(errors), "high": max(errors), "n": len(errors)}))


if __name__ == "__main__":
    main()

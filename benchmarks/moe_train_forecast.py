"""How far the forecast of each rank's peak of memory is from what the rank allocates.

    python benchmarks/moe_train_forecast.py [--keys] [--only recomputed]

Four families of decoders, with and without recompute, on one process and on pp=2 x ep=2; with
--keys one decoder under the keys of the trainer that change its memory. Every rank of each job is
forecast in one process on tensors without memory, as `moe-train plan` does, and then run: real
processes with gloo, real tensors, the same recorder, in all threads.

What the forecast assumes and says is made so in the real runs, all else is theirs: tokens choose
experts evenly, what runs beside a rank's program has ended when it goes on, messages come when they
are waited for, and stages take the time of their counted work. With --as-it-comes only the first.
Products of experts in fp8, which a CPU has not, are made there by others that take the same memory.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from comm_collectives.call.handles import handles
from gpu_alloc.trace import summarize
from moe_pipeline.executor import edges
from moe_pipeline.experts import fp8
from moe_pipeline.router import top_k
from moe_pipeline.schedules import StageCosts
from moe_train.config import Config, load_config
from moe_train.jobs.rank_alone import record_alone, record_steps
from moe_train.parallel import Parallel, start
from moe_train.training.pipelines import pipeline
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
_PP2, _EP2, _DP2 = "parallel.pp=2", "parallel.ep=2", "parallel.dp=2"
_FP8 = ["model.experts_fp8=true", 'train.dtype="bfloat16"']
_DEEP = {"num_hidden_layers": 4}
KEYS: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "experts_fp8": ("qwen3_moe", _FP8, {}),
    "experts_fp8, ep=2": ("qwen3_moe", [*_FP8, _EP2], {}),
    "schedule auto": ("qwen3_moe", [_PP2, _EP2, 'parallel.schedule="auto"'], _DEEP),
    "schedule zb_1p": ("qwen3_moe", [_PP2, 'parallel.schedule="zb_1p"'], {}),
    "schedule zbv": ("qwen3_moe", [_PP2, 'parallel.schedule="zbv"'], _DEEP),
    "schedule v_half": ("qwen3_moe", [_PP2, 'parallel.schedule="v_half"'], _DEEP),
    "schedule dualpipe_v": (
        "qwen3_moe",
        [_PP2, 'parallel.schedule="dualpipe_v"', "train.gradient_accumulation_steps=4"],
        _DEEP,
    ),
    "schedule interleaved": ("qwen3_moe", [_PP2, 'parallel.schedule="interleaved_1f1b"'], _DEEP),
    "dispatch_chunks=2": ("qwen3_moe", [_EP2, "moe.dispatch_chunks=2"], {}),
    "dispatch_chunks=4, recomputed": (
        "qwen3_moe",
        [_EP2, "moe.dispatch_chunks=4", 'train.recompute="layers"'],
        {},
    ),
    "shared_expert_overlap": ("deepseek_v3", [_EP2, "moe.shared_expert_overlap=true"], {}),
    "dedup in float8": (
        "qwen3_moe",
        [_EP2, 'moe.dispatch_route="dedup"', 'moe.dispatch_payload="float8_e4m3"'],
        {},
    ),
    "capacity_factor": ("qwen3_moe", [_EP2, "moe.capacity_factor=1.25"], {}),
    "expert_parts": ("qwen3_moe", [_EP2, 'parallel.expert_parts=["2,4"]'], {}),
    "cp=2": ("qwen3_moe", [_DP2, "parallel.cp=2"], {}),
    "cp=2, ring": ("qwen3_moe", [_DP2, "parallel.cp=2", 'parallel.cp_attention="ring"'], {}),
    "tp=2": ("qwen3_moe", [_DP2, "parallel.tp=2"], {}),
    "tp=2, ep=2, pp=2": ("qwen3_moe", [_PP2, _EP2, "parallel.tp=2"], {}),
    "etp=2, ep=2": ("qwen3_moe", [_DP2, _EP2, "parallel.etp=2"], {}),
    "sharding=1": ("qwen3_moe", [_DP2, "parallel.sharding=1"], {}),
    "sharding=2, ep=2": ("qwen3_moe", [_DP2, _EP2, "parallel.sharding=2"], {}),
    "sharding=3": ("qwen3_moe", [_DP2, "parallel.sharding=3"], {}),
    "sharding=3, ep=2, recomputed": (
        "qwen3_moe",
        [_DP2, _EP2, "parallel.sharding=3", 'train.recompute="layers"'],
        {},
    ),
    "overlap_grad_reduce": ("qwen3_moe", [_DP2, _EP2, "parallel.overlap_grad_reduce=true"], {}),
    "muon, sharding=2": (
        "qwen3_moe",
        [_DP2, "parallel.sharding=2", 'optimizer.name="muon"'],
        {},
    ),
    "master_weights": ("qwen3_moe", ['train.dtype="bfloat16"', "train.master_weights=true"], {}),
    "stochastic_rounding": (
        "qwen3_moe",
        ['train.dtype="bfloat16"', "train.stochastic_rounding=true"],
        {},
    ),
    "recompute selective": ("qwen3_moe", ['train.recompute="selective"'], {}),
    "recompute outputs": ("qwen3_moe", [_PP2, _EP2, 'train.recompute="outputs"'], {}),
    "loss_chunk_tokens": ("qwen3_moe", ["train.loss_chunk_tokens=32"], {}),
    "trainable": ("qwen3_moe", ['train.trainable=["*.mlp.gate.weight"]'], {}),
    "grouped_mm": ("qwen3_moe", ['model.experts_implementation="grouped_mm"'], {}),
    "moments int8": ("qwen3_moe", ['checkpoint.moments="int8"'], {}),
}
LAYOUTS = {"1 process": [], "pp=2 x ep=2": ["parallel.pp=2", "parallel.ep=2"]}
RECOMPUTE = {"kept": [], "recomputed": ['train.recompute="layers"']}


def job(
    folder: Path, family: str, overrides: list[str], sizes: Mapping[str, int] | None = None
) -> Config:
    folder.mkdir()
    model = {"model_type": family} | _COMMON | FAMILIES[family] | dict(sizes or {})
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


def _ends_at_once(
    submit: Callable[..., tuple[Future[Any], Any]],
) -> Callable[..., tuple[Future[Any], Any]]:
    def submitted(*given: Any) -> tuple[Future[Any], Any]:
        future, event = submit(*given)
        wait([future])
        return future, event

    return submitted


def _product(rows: Any, weight: Any, offsets_E: torch.Tensor) -> torch.Tensor:
    """What the kernel of fp8 makes; of the way there nothing is recorded."""
    with _disable_current_modes():
        left, right = (each.dequantized().bfloat16() for each in (rows, weight))
        product = F.grouped_mm(left, right.mT, offs=offsets_E)
    return product.clone()


@contextmanager
def _as_forecast(as_it_comes: bool) -> Iterator[None]:
    """See the module's docstring."""
    put = [
        (fp8, "fp8_obstacle", lambda weights: None),
        (fp8, "scaled_grouped_mm", _product),
    ]
    if not as_it_comes:
        put += [
            (handles, "_submit", _ends_at_once(handles._submit)),
            (edges.GroupEdges, "_expect_next", lambda *_: None),
            (pipeline, "_shared_costs", _counted),
        ]
    before = [(place, name, getattr(place, name)) for place, name, _ in put]
    for place, name, value in put:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _counted(config: Config, stages: Any, parallel: Parallel) -> list[StageCosts]:
    """In the place of what stages are measured to take; collective over all ranks."""
    told: list[dict[int, StageCosts]] = [{}] * parallel.mesh.size
    dist.all_gather_object(told, pipeline.counted_costs(config, stages, parallel))
    found = {number: cost for costs in told for number, cost in costs.items()}
    return [found[number] for number in sorted(found)]


def real(config: Config, as_it_comes: bool = False) -> int:
    """The most bytes that this rank has at a time."""
    torch.set_num_threads(1)
    with _evenly(), _as_forecast(as_it_comes):
        return summarize(record_steps(config, start(config)).events).peak_live_bytes


def forecasts(configs: list[Config]) -> list[list[int]]:
    """The forecast peak of every rank of every job, all in one process."""

    def peaks(*_: int) -> list[list[int]]:
        return [[_peak(config, rank) for rank in range(config.world_size)] for config in configs]

    # A process of its own: autograd's threads, which fake tensors start, do not survive a fork.
    return run_ranks(peaks, 1, init=False, timeout_s=1800)[0]  # type: ignore[return-value]


def _peak(config: Config, rank: int) -> int:
    return summarize(record_alone(config, rank).events).peak_live_bytes


def jobs(folder: Path, keys: bool) -> dict[str, Config]:
    """By name; each with a folder of its own."""
    if keys:
        return {
            name: job(folder / str(number), family, overrides, sizes)
            for number, (name, (family, overrides, sizes)) in enumerate(KEYS.items())
        }
    return {
        f"{family}, {kept}, {layout}": job(
            folder / f"{family}-{kept}-{layout}", family, [*where, *how]
        )
        for family in FAMILIES
        for layout, where in LAYOUTS.items()
        for kept, how in RECOMPUTE.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="jobs whose name has one of these")
    parser.add_argument("--keys", action="store_true", help="one decoder, by key of the trainer")
    parser.add_argument("--as-it-comes", action="store_true", help="see above; for a look")
    given = parser.parse_args()
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        all_jobs = jobs(Path(folder), given.keys).items()
        chosen = {n: c for n, c in all_jobs if any(part in n for part in given.only)}
        found = forecasts(list(chosen.values()))
        for (name, config), peaks in zip(chosen.items(), found, strict=True):
            run: Any = partial(_real, config, given.as_it_comes)
            allocated: Any = run_ranks(run, config.world_size, timeout_s=300)
            for rank, (peak, most) in enumerate(zip(peaks, allocated, strict=True)):
                errors.append(abs(peak - most) / most)
                print(f"{name}, rank {rank}: forecast {peak}, allocated {most}", flush=True)
    figure = "moe_train_forecast_error_by_key" if given.keys else "moe_train_forecast_error"
    record = {"figure": figure, "value": max(errors), "unit": "of the peak"}
    print(json.dumps(record | {"low": min(errors), "high": max(errors), "n": len(errors)}))


def _real(config: Config, as_it_comes: bool, *_: int) -> int:
    return real(config, as_it_comes)


if __name__ == "__main__":
    main()

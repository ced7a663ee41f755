"""What a job will need, before it is run: `moe-train plan`.

Ranks are built and trained for two steps one after another in this process, on tensors without
memory (`rank_alone.py`). The peak of live bytes is what a rank needs; what an allocator reserves is
found by running the rank's trace through its rules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpu_alloc import AllocatorConfig, TraceEvent, save_trace
from gpu_alloc.torch import forecast
from moe_train.config import Config
from moe_train.early_checks import allocator_settings
from moe_train.errors import TrainValueError, check_type
from moe_train.jobs.job import check_model
from moe_train.jobs.rank_alone import planned_otherwise, record_alone, schedule_alone
from moe_train.layout import is_expert
from moe_train.model import DecoderConfig, DecoderStage
from moe_train.training import read_model_config
from moe_train.training.memory import trace_file
from moe_train.training.pipelines import traffic_table

_MIB = 2**20
_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "dispatch buffers")
_ALLOCATORS: tuple[Literal["torch", "torch-expandable", "gpu-alloc"], ...] = (
    "torch",
    "torch-expandable",
    "gpu-alloc",
)
_ASSUMED = (
    "assumed: tokens choose experts evenly, all sequences are full, and operators are those of the "
    "CPU; not counted: the driver's context, libraries' workspaces, NCCL's buffers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole decoder; `active` are those that one token passes through."""

    total: int
    active: int


def count_parameters(model: DecoderConfig) -> ParameterCount:
    """Count the parameters of a decoder without memory; those of multi-token prediction too."""
    total = idle = 0
    for name, parameter in DecoderStage.without_memory(model).named_parameters():
        total += parameter.numel()
        if is_expert(name):
            used = model.moe.num_experts_per_tok
            idle += parameter.numel() // model.num_experts * (model.num_experts - used)
    return ParameterCount(total=total, active=total - idle)


def plan_report(
    config: Config, *, traces: Path | None = None, ranks: Sequence[int] | None = None
) -> str:
    """Train ranks for two steps without memory, and describe parameters and memory.

    traces: a folder that keeps each rank's trace, for `gpu-alloc explain` and `tune`; None keeps
        none.
    ranks: which; None: all of the job.

    Raises:
        ValueError: the layout does not fit the model, or a rank is none of the job.
        MoeTrainError: this process is a rank of a job.
    """
    check_type("config", config, Config)
    model = read_model_config(config)
    check_model(config, model)
    chosen = range(config.world_size) if ranks is None else ranks
    if strange := [rank for rank in chosen if not 0 <= rank < config.world_size]:
        raise TrainValueError(
            f"rank {strange[0]} is none of the job's {config.world_size}; give 0 to "
            f"{config.world_size - 1}"
        )
    schedule = schedule_alone(config)
    count, settings = count_parameters(model), allocator_settings(config)
    lines = [
        f"parameters  {count.total:,} ({count.active:,} active for a token)",
        f"ranks       {config.world_size} = pp {config.parallel.pp} x dp {config.parallel.dp} "
        f"x ep {config.parallel.ep}{_sharing(config)}, {config.parallel.schedule}",
        _row("MiB", "peak", *_CATEGORIES, *(f"by {name}" for name in _ALLOCATORS)),
    ]
    for rank in chosen:
        trace = record_alone(config, rank, schedule).events
        if traces is not None:
            traces.mkdir(parents=True, exist_ok=True)
            save_trace(trace, trace_file(traces, rank))
        lines.append(_row_of_rank(rank, trace, settings))
    return "\n".join([*lines, _ASSUMED, *planned_otherwise(config), *traffic_table(config, model)])


def _sharing(config: Config) -> str:
    sizes = {"cp": config.parallel.cp, "tp": config.parallel.tp}
    told = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    told = f" (each {math.prod(sizes.values())} share their samples: {told})" if told else ""
    etp = config.parallel.etp
    return told + (f" (each {etp} share their experts: etp {etp})" if etp > 1 else "")


def _row_of_rank(rank: int, trace: Sequence[TraceEvent], settings: AllocatorConfig) -> str:
    of = {"gpu-alloc": settings}
    found = [forecast(trace, allocator, of.get(allocator)) for allocator in _ALLOCATORS]
    parts = found[0].peak_by_category
    sizes = [found[0].peak_bytes, *(parts.get(name, 0) for name in _CATEGORIES)]
    sizes += [each.reserved_bytes for each in found]
    return _row(f"rank {rank}", *(f"{size / _MIB:.1f}" for size in sizes))


def _row(name: str, *columns: str) -> str:
    return f"{name:<12}" + "".join(f"{column:>20}" for column in columns)

"""What a job will need, before it is run: `moe-train plan`.

Every rank of the real layout is built and runs two steps on random tokens while its allocations are
recorded; gpu-alloc then replays each rank's trace through its two-pool policy. The peak of live
bytes is what the job needs; the peak of reserved bytes is what the allocator takes for it.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_alloc import AllocatorConfig, load_trace, replay, save_trace
from gpu_alloc.torch import TraceRecorder
from moe_train.config import Config, dump_toml
from moe_train.data import Batch
from moe_train.errors import MoeTrainError, check_type
from moe_train.jobs.job import check_model
from moe_train.launch import run_local
from moe_train.layout import is_expert
from moe_train.model import DecoderConfig, DecoderStage
from moe_train.parallel import Parallel, start
from moe_train.training import build_runner, read_model_config
from moe_train.training.pipelines import traffic_table

_MIB = 2**20
_STEPS = 2  # the second one allocates what stays after the first


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


def plan_report(config: Config, *, traces: Path | None = None) -> str:
    """Run every rank for two steps and describe parameters and memory.

    traces: a folder that keeps each rank's trace, for `gpu-alloc explain` and `tune`; None keeps
        none.

    Raises:
        ValueError: the layout does not fit the model.
        MoeTrainError: a rank failed.
    """
    check_type("config", config, Config)
    model = read_model_config(config)
    check_model(config, model)
    count = count_parameters(model)
    lines = [
        f"parameters  {count.total:,} ({count.active:,} active for a token)",
        f"ranks       {config.world_size} = pp {config.parallel.pp} x dp {config.parallel.dp} "
        f"x ep {config.parallel.ep}, {config.parallel.schedule}",
        f"{'MiB':<12}{'live peak':>12}{'reserved peak':>16}{'ratio':>8}",
    ]
    settings = AllocatorConfig.from_env()
    with ExitStack() as stack:
        folder = str(traces) if traces is not None else stack.enter_context(_scratch())
        Path(folder).mkdir(parents=True, exist_ok=True)
        toml = Path(folder) / "plan.toml"
        toml.write_text(dump_toml(config), encoding="utf-8")
        argv = [str(toml), folder]
        if run_local(config.world_size, "moe_train.jobs.plan_rank", argv) is not None:
            raise MoeTrainError("the plan was stopped before every rank had run its steps")
        for rank in range(config.world_size):
            result = replay(load_trace(trace_file(Path(folder), rank)), settings)
            live, reserved = result.peak_live_bytes, result.peak_reserved_bytes
            lines.append(
                f"rank {rank:<7}{live / _MIB:>12.1f}{reserved / _MIB:>16.1f}"
                f"{reserved / max(live, 1):>8.2f}"
            )
    lines += traffic_table(config, model)
    return "\n".join(lines)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moe-train-plan-")


def record_rank(config: Config, folder: Path) -> int:
    """Run two steps of this rank on random tokens and write its trace; return 2. Collective."""
    parallel = start(config)
    model = read_model_config(config)
    with TraceRecorder() as recorder:
        with recorder.phase("build"):
            runner, _ = build_runner(config, model, parallel, {})
        for step in range(_STEPS):
            with recorder.phase(f"step {step}"):
                runner.train(
                    _random_batches(config, model.vocab_size, parallel), lr=config.optimizer.lr
                )
    save_trace(recorder.events, trace_file(folder, parallel.rank))
    return _STEPS


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank's trace goes."""
    return folder / f"rank-{rank:05d}.jsonl"


def _random_batches(config: Config, vocab_size: int, parallel: Parallel) -> list[Batch]:
    if not (parallel.is_first or parallel.is_last):
        return []
    count = config.train.gradient_accumulation_steps
    rows = config.train.global_batch_size // (count * parallel.num_data_ranks)
    length = config.data.sequence_length
    generator = torch.Generator().manual_seed(config.train.seed + parallel.data_rank)
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, vocab_size, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, length)
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        batches.append(Batch(input_ids=ids, labels=labels, position_ids=positions))
    return batches

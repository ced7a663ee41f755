"""Time of a pipeline step against torch.distributed.pipelining, over gloo, in one run.

The same stages, weights, batch and schedule on both sides, on 2 and on 4 processes with one thread
each: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble and ZBVZeroBubble, for a dense model and
for a mixture of experts; ours with its option `gradient_accumulation_fusion`, unless `--unfused`.
Losses and gradients of both sides are compared first. Then steps alternate, and who begins
alternates too. Wall time runs from a barrier to a barrier; CPU time is that of all ranks together,
with all of their threads. A figure is the median over rounds of ours to torch's (less is better),
with the quartiles. `pipeline_step_*_slowest` is the largest lower quartile: above 1 a case is
slower than torch beyond the noise. `pipeline_step_*_mean` is the geometric mean of the medians;
both come with the range of the medians. A case ends before its last round once it has had five, and
its upper quartile is below 1: more of them would not find it slower.

    python benchmarks/moe_pipeline_step_time.py
    python benchmarks/moe_pipeline_step_time.py --schedules 1F1B --ranks 2 --width 256 --rounds 80

The narrower the layers, the more a figure says of the Python around a product and a transfer.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from moe_pipeline.config import MoEConfig
from moe_pipeline.executor import ExecutorOptions
from moe_pipeline.layer import MoELayer
from moe_pipeline.torch_compat import get_schedule_class
from ranktest import run_ranks

ROWS = 128  # of a microbatch
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
SINGLE = ("GPipe", "1F1B")
Step = Callable[[], float]


class Dense(nn.Module):
    """A gated MLP with a residual, as in a dense decoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Sparse(nn.Module):
    """A layer of this package: 8 experts, 2 for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        config = MoEConfig(
            hidden_size=width,
            moe_intermediate_size=width,
            num_experts=8,
            num_experts_per_tok=2,
            initializer_range=0.05,
        )
        self.mlp = MoELayer(config)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        out: Tensor = self.mlp(self.norm(x)).hidden
        return x + out


MODELS: dict[str, tuple[type[nn.Module], int]] = {"dense": (Dense, 2), "moe": (Sparse, 1)}


class Model(NamedTuple):
    """Which layers, how wide, and whether our side adds up gradients in the products."""

    name: str
    width: int
    fusion: bool


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank, as torch places them."""
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name.startswith("ZBV") else [rank, rank + ranks]


def side(kind: Callable[..., Any], model: Model, name: str, rank: int, ranks: int) -> Any:
    """A schedule with stages of its own, and those stages' modules."""
    layer, blocks = MODELS[model.name]
    count = ranks if name in SINGLE else 2 * ranks
    stages, modules = [], []
    for index in stages_of(name, rank, ranks):
        torch.manual_seed(index)
        per_stage = blocks * (2 if name in SINGLE else 1)
        modules.append(nn.Sequential(*(layer(model.width) for _ in range(per_stage))))
        stages.append(PipelineStage(modules[-1], index, count, torch.device("cpu")))
    given = stages[0] if name in SINGLE else stages
    schedule = kind(given, n_microbatches=4 * ranks, loss_fn=F.mse_loss)
    return schedule, modules


def step(schedule: Any, modules: Sequence[nn.Module], args: Any, kwargs: Any) -> list[float]:
    """One step from no gradients; the losses, on the last stage."""
    losses: list[Tensor] = []
    for module in modules:
        module.zero_grad()
    schedule.step(*args, **kwargs, losses=losses, return_outputs=False)
    return [loss.item() for loss in losses]


def check_equal(ours: Any, theirs: Any, ran: Sequence[list[float]]) -> None:
    """Raise unless losses and gradients agree to fp32 rounding."""
    torch.testing.assert_close(torch.tensor(ran[0]), torch.tensor(ran[1]), rtol=1e-4, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds between barriers, CPU of this process."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def compare(
    rank: int, ranks: int, *, model: Model, name: str, rounds: int
) -> list[tuple[float, float, float, float]]:
    """For each round: wall and CPU seconds of ours, wall and CPU seconds of torch's."""
    torch.set_num_threads(1)
    shape = 2, 4 * ranks * ROWS, model.width
    x, target = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    last = (ranks if name in SINGLE else 2 * ranks) - 1
    args = (x,) if rank == 0 else ()
    kwargs = {"target": target} if last in stages_of(name, rank, ranks) else {}
    options = ExecutorOptions(gradient_accumulation_fusion=model.fusion)
    of_ours = partial(get_schedule_class(name), executor_options=options)
    of_torch = torch_schedules.get_schedule_class(name)
    ours, our_modules = side(of_ours, model, name, rank, ranks)
    theirs, their_modules = side(of_torch, model, name, rank, ranks)
    runs = [
        partial(step, ours, our_modules, args, kwargs),
        partial(step, theirs, their_modules, args, kwargs),
    ]
    check_equal(our_modules, their_modules, [run() for run in runs])
    gc.collect()
    gc.freeze()
    found: list[tuple[float, float, float, float]] = []
    while len(found) < rounds and not is_decided([row[0] / row[2] for row in found]):
        order = (0, 1) if len(found) % 2 == 0 else (1, 0)
        times = {which: timed(runs[which]) for which in order}
        found.append((*times[0], *times[1]))
    return found


def is_decided(ratios: Sequence[float]) -> bool:
    """Whether a case needs no further round, by the wall times of the first rank. Collective."""
    enough = len(ratios) >= 5 and statistics.quantiles(ratios, n=4)[2] < 1
    told = torch.tensor([enough])
    dist.broadcast(told, 0)
    return bool(told)


def report(figure: str, values: Sequence[float]) -> tuple[float, float]:
    """Print the median with the quartiles; return the lower quartile and the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    fields = {"value": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
    print(json.dumps({"figure": figure, **fields, "unit": "x", "n": len(values)}), flush=True)
    return low, middle


def summarize(kind: str, cases: Sequence[tuple[float, float]]) -> None:
    """Print what holds of all cases, given the lower quartile and the median of each."""
    lows, medians = zip(*cases, strict=True)
    spread = {"low": round(min(medians), 4), "high": round(max(medians), 4)}
    figures = {"slowest": max(lows), "mean": statistics.geometric_mean(medians)}
    for name, value in figures.items():
        line = {"figure": f"pipeline_step_{kind}_{name}", "value": round(value, 4), **spread}
        print(json.dumps({**line, "unit": "x", "n": len(cases)}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a JSON line for each case and for all cases, of both kinds of time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--unfused", action="store_true", help="no gradient_accumulation_fusion")
    given = parser.parse_args(argv)
    cases: dict[str, list[tuple[float, float]]] = {"wall": [], "cpu": []}
    for ranks, model, name in itertools.product(given.ranks, given.models, given.schedules):
        wide = Model(model, given.width, not given.unfused)
        run = partial(compare, model=wide, name=name, rounds=given.rounds)
        by_rank: list[Any] = run_ranks(run, ranks, timeout_s=600)
        rounds = list(zip(*by_rank, strict=True))
        ratios = {
            "wall": [of[0][0] / of[0][2] for of in rounds],
            "cpu": [sum(r[1] for r in of) / sum(r[3] for r in of) for of in rounds],
        }
        for kind, values in ratios.items():
            figure = f"pipeline_step_{kind}_{name}_{model}_{ranks}_ranks"
            cases[kind].append(report(figure, values))
    for kind, found in cases.items():
        summarize(kind, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

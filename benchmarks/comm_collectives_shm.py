"""The shared-memory backend against gloo: every collective, 4 KiB to 64 MiB, in alternating rounds.

Two ranks, each on one thread; the bytes are those of each rank's input. A cell is the median over
rounds of gloo's time / ours, a round's time that of its slowest rank; a figure is that of the worst
cell, with its quartiles. The floor of an all_reduce is two copies of its bytes by each rank (into
shared memory, and the sum out of it), taken in the same rounds. Four ranks are reported too; with
fewer cores than ranks they measure the scheduler more than the backends.

    python benchmarks/comm_collectives_shm.py
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from comm_collectives.checking import START_S, LocalRanks
from comm_collectives.errors import CommError
from comm_collectives.shm import BACKEND_NAME, ShmBackend, register_backends

TIMEOUT_S = 1200
LARGEST = 64 << 20
SIZES = (1 << 12, 1 << 16, 1 << 20, 8 << 20, LARGEST)
_ROUNDS = 21
# Calls in a round, so that a round is long enough to be timed.
_CALLS = {1 << 12: 100, 1 << 16: 50, 1 << 20: 10, 8 << 20: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """What to measure: `rounds` rounds of each backend, a few calls in each."""

    collective: str
    num_bytes: int
    rounds: int

    @property
    def calls(self) -> int:
        """Calls in one round."""
        return _CALLS.get(self.num_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Seconds a call, one figure a round; `copy_s` is for one copy of the rank's input."""

    case: BenchCase
    gloo_s: list[float]
    shm_s: list[float]
    copy_s: list[float]

    @property
    def speedup(self) -> tuple[float, float, float]:
        """Speed of shared memory in terms of gloo's: lower quartile, median, upper quartile."""
        return quartiles([g / s for g, s in zip(self.gloo_s, self.shm_s, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All results of one run; without shared memory both backends are gloo."""

    num_ranks: int
    shares_memory: bool
    results: tuple[BenchResult, ...]


def bench_machine(num_ranks: int, *, timeout_s: float) -> BenchReport:
    """Start ranks on this machine and measure every collective and size.

    `timeout_s` is the limit for all of it.

    Raises:
        CommError: a rank died or did not finish.
    """
    cases = [
        BenchCase(collective=collective, num_bytes=num_bytes, rounds=_ROUNDS)
        for collective in _COLLECTIVES
        for num_bytes in SIZES
    ]
    deadline = time.monotonic() + timeout_s
    results, shared = [], False
    with LocalRanks(num_ranks, measure, limit_s=timeout_s + START_S) as ranks:
        for case in cases:
            (replies,) = ranks.ask([case], limit_s=max(0.0, deadline - time.monotonic()))
            for rank, reply in enumerate(replies):
                if reply.lost:
                    raise CommError(f"rank {rank} in {case.collective}: {reply.lost}")
            shared = replies[0].value.pop("shared")
            slowest = {
                name: [max(times) for times in zip(*(r.value[name] for r in replies), strict=True)]
                for name in replies[0].value
            }
            results.append(BenchResult(case=case, **slowest))
    return BenchReport(num_ranks=num_ranks, shares_memory=shared, results=tuple(results))


def measure(case: BenchCase) -> dict[str, bool | list[float]]:
    """Measure one case on one rank. Collective, for the ranks of the default group."""
    gloo, shm = _groups()
    size = dist.get_world_size()
    source = torch.zeros(case.num_bytes // 4).fill_(0.0)
    run = _COLLECTIVES[case.collective](source, size)
    copied = torch.empty_like(source)
    times: dict[str, list[float]] = {"gloo_s": [], "shm_s": [], "copy_s": []}

    def timed(name: str, group: dist.ProcessGroup, call: Callable[[], object]) -> None:
        dist.barrier(group=group)
        started = time.perf_counter()
        for _ in range(case.calls):
            call()
        times[name].append((time.perf_counter() - started) / case.calls)

    for group in (gloo, shm):
        run(group=group)
    for turn in range(case.rounds):
        backends = [("gloo_s", gloo), ("shm_s", shm)]
        for name, group in backends if turn % 2 else reversed(backends):
            timed(name, group, lambda group=group: run(group=group))  # type: ignore[misc]
        timed("copy_s", gloo, lambda: copied.copy_(source))
    cpu = torch.device("cpu")
    backend = shm._get_backend(cpu)
    return {**times, "shared": isinstance(backend, ShmBackend) and backend.shares_memory}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def format_bench(report: BenchReport) -> str:
    """Return the medians as text, one row a collective and one column a size."""
    sizes = list(dict.fromkeys(result.case.num_bytes for result in report.results))
    lines = [
        f"torch {torch.__version__}, {report.num_ranks} ranks, {os.cpu_count()} cores, "
        f"Python {platform.python_version()} on {platform.machine()}",
        f"speed of {BACKEND_NAME} in terms of gloo's (median of "
        f"{report.results[0].case.rounds} alternating rounds; bytes of each rank's input)",
        f"{'collective':<24}" + "".join(f"{_size_text(num_bytes):>10}" for num_bytes in sizes),
    ]
    for collective in dict.fromkeys(result.case.collective for result in report.results):
        row = [r.speedup[1] for r in report.results if r.case.collective == collective]
        lines.append(f"{collective:<24}" + "".join(f"{f'{speed:.2f}x':>10}" for speed in row))
    if not report.shares_memory:
        lines.append(f"The ranks share no memory: {BACKEND_NAME} is gloo here.")
    return "\n".join(lines)


# By name: a call with the input and the number of ranks, but for the group.
_COLLECTIVES: dict[str, Callable[[torch.Tensor, int], Callable[..., object]]] = {
    "all_reduce": lambda x, size: partial(dist.all_reduce, x),
    "all_to_all_single": lambda x, size: partial(dist.all_to_all_single, torch.empty_like(x), x),
    "all_gather_into_tensor": lambda x, size: partial(
        dist.all_gather_into_tensor, x.new_empty(x.numel() * size), x
    ),
    "reduce_scatter_tensor": lambda x, size: partial(
        dist.reduce_scatter_tensor, x.new_empty(x.numel() // size), x[: x.numel() // size * size]
    ),
    "broadcast": lambda x, size: partial(dist.broadcast, x, 0),
}


@cache
def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make a group of each backend on this rank. Collective at its first call."""
    register_backends()
    return _new_group("gloo"), _new_group(BACKEND_NAME)


def _new_group(backend: str) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend)
    if not isinstance(group, dist.ProcessGroup):
        raise CommError(f"torch made no group of backend {backend}")
    return group


def _size_text(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def figure(name: str, spread: tuple[float, float, float], where: BenchResult) -> None:
    low, middle, high = (round(value, 3) for value in spread)
    values = {"value": middle, "low": low, "high": high, "unit": "x", "n": where.case.rounds}
    cell = f"{where.case.collective}, {where.case.num_bytes} bytes"
    print(json.dumps({"figure": name, **values, "worst": cell}))


def worst(results: list[BenchResult]) -> BenchResult:
    return min(results, key=lambda result: result.speedup[1])


def main() -> None:
    for num_ranks in (2, 4):
        report = bench_machine(num_ranks, timeout_s=TIMEOUT_S)
        print(format_bench(report), file=sys.stderr)
        suffix = "" if num_ranks == 2 else f"_{num_ranks}_ranks"
        results = list(report.results)
        slowest = worst(results)
        figure(f"shm_worst_speed_vs_gloo{suffix}", slowest.speedup, slowest)
        exchanges = [r for r in results if r.case.collective == "all_to_all_single"]
        slowest = worst([r for r in exchanges if r.case.num_bytes <= 1 << 16])
        figure(f"shm_all_to_all_speed_vs_gloo_to_64kib{suffix}", slowest.speedup, slowest)
        reductions = [r for r in results if r.case.collective == "all_reduce"]
        slowest = worst([r for r in reductions if r.case.num_bytes >= 1 << 20])
        figure(f"shm_all_reduce_speed_vs_gloo_from_1mib{suffix}", slowest.speedup, slowest)
        if num_ranks == 2:
            big = next(r for r in reductions if r.case.num_bytes == LARGEST)
            over = [s / (2 * c) for s, c in zip(big.shm_s, big.copy_s, strict=True)]
            figure("shm_all_reduce_time_vs_two_copies", quartiles(over), big)


if __name__ == "__main__":
    main()

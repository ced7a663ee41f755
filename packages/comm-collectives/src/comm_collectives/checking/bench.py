"""The sub-command `bench`: what shared memory gains over gloo on this machine, per collective.

Both backends run in the same processes, in rounds that alternate, so that a busy machine slows both
down; a round takes as long as its slowest rank. The sizes are those of each rank's input.

    report = bench_machine(2, timeout_s=300)
    print(format_bench(report))
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
import torch.distributed as dist

from comm_collectives.checking.local_ranks import START_S, LocalRanks
from comm_collectives.errors import CommError, CommValueError
from comm_collectives.shm import BACKEND_NAME, ShmBackend, register_backends

SIZES = (1 << 12, 1 << 16, 1 << 20, 8 << 20, 64 << 20)
QUICK_SIZES = SIZES[:3]
# The ranks need some time to connect, whatever the limit for the measurement.
_ROUNDS, _QUICK_ROUNDS = 21, 5
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


def bench_machine(num_ranks: int, *, timeout_s: float, quick: bool = False) -> BenchReport:
    """Start ranks on this machine and measure every collective and size.

    `timeout_s` is the limit for all of it; `quick` measures up to 1 MiB, in fewer rounds.

    Raises:
        ValueError: there are not two ranks to exchange anything.
        CommError: a rank died or did not finish.
    """
    if num_ranks < 2:
        raise CommValueError(f"world size {num_ranks} must be at least 2")
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    cases = [
        BenchCase(collective=collective, num_bytes=num_bytes, rounds=rounds)
        for collective in _COLLECTIVES
        for num_bytes in (QUICK_SIZES if quick else SIZES)
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


def to_json(report: BenchReport) -> str:
    """Return every time of every round as JSON."""
    cells = []
    for result in report.results:
        cell = asdict(result)
        speedup = dict(zip(("low", "median", "high"), result.speedup, strict=True))
        cells.append({**cell.pop("case"), "speedup": speedup, **cell})
    return json.dumps(
        {"num_ranks": report.num_ranks, "shares_memory": report.shares_memory, "cells": cells}
    )


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit status: 0, 1 if a rank failed, 2 if misused."""
    if args.world_size < 2 or args.timeout_s <= 0:
        wanted = "--world-size must be at least 2 and --timeout-s positive"
        print(f"comm-collectives: {wanted}", file=sys.stderr)
        return 2
    try:
        report = bench_machine(args.world_size, timeout_s=args.timeout_s, quick=args.quick)
    except CommError as error:
        print(f"comm-collectives: {error}", file=sys.stderr)
        return 1
    print(to_json(report) if args.json else format_bench(report))
    return 0


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

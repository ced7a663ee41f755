"""What it costs that the ranks compare every call, against bare gloo: on one host and across hosts.

Two ranks over gloo, default policy, all_reduce and all_to_all with given splits, 1 to 1,048,576
float32 elements of each rank for each. "Across hosts" is what the proof of the comparison itself
uses (`comm_collectives_pairs.py`): every rank has a /dev/shm of its own, all else is the default,
and bytes travel over TCP as gloo's do. Both write into a new tensor. Blocks of ours and of
torch.distributed's alternate; every figure is the median over the rounds of ours / theirs, with the
quartiles. Those of the claims are the worst of their calls and sizes.

    python benchmarks/comm_collectives_agreement.py [rounds]
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from ranktest import leave_shared_memory, run_ranks

RANKS = 2
ROUNDS = 30
SIZES = (1, 1_024, 65_536, 131_072, 1_048_576)
LARGE_BYTES = 512 << 10
CALLS_OF = {size: 40 if size <= 1_024 else 10 for size in SIZES}
PLACES = ("one_host", "across_hosts")


def timed(call: Callable[[], object], calls: int) -> float:
    """Seconds of so many calls, all ranks starting together."""
    call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - started


def rank_main(place: str, rounds: int) -> dict[str, list[float]]:
    """Measure on one rank; returns the ratios of each round."""
    if place == "across_hosts":
        leave_shared_memory()
    ratios: dict[str, list[float]] = {}
    for size in SIZES:
        x, rows = torch.ones(size), torch.ones(RANKS * size)
        splits = [size] * RANKS
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "all_reduce": (lambda x=x: cc.all_reduce(x), lambda x=x: dist.all_reduce(x.clone())),
            "all_to_all": (
                lambda rows=rows, s=splits: cc.all_to_all(rows, input_splits=s, output_splits=s),
                lambda rows=rows: dist.all_to_all_single(torch.empty_like(rows), rows),
            ),
        }
        for _ in range(rounds):
            for name, (ours, bare) in calls.items():
                ratio = timed(ours, CALLS_OF[size]) / timed(bare, CALLS_OF[size])
                ratios.setdefault(f"{name}_{size}", []).append(ratio)
    return ratios


def measured(place: str, rounds: int) -> dict[str, list[float]]:
    """The ratios that rank 0 measures."""
    ranks: Any = run_ranks(lambda rank, world_size: rank_main(place, rounds), RANKS, timeout_s=900)
    ratios: dict[str, list[float]] = ranks[0]
    return ratios


def report(figure: str, values: list[float]) -> None:
    """Print the median and the quartiles of a figure."""
    low, middle, high = statistics.quantiles(values, n=4)
    spread = {"value": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    print(json.dumps({"figure": figure, **spread, "unit": "x", "n": len(values)}), flush=True)


def main() -> None:
    """Print every figure; those of the claims last."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    found: dict[str, dict[str, list[float]]] = {}
    for place in PLACES:
        found[place] = measured(place, rounds)
        for name, values in found[place].items():
            report(f"agreement_{place}_{name}", values)
    for place in PLACES:
        large = [size for size in SIZES if 4 * size >= LARGE_BYTES]
        for kind, sizes in (("large", large), ("small", [n for n in SIZES if n not in large])):
            ratios = [found[place][f"{n}_{s}"] for n in ("all_reduce", "all_to_all") for s in sizes]
            report(f"agreement_{place}_{kind}", max(ratios, key=statistics.median))


if __name__ == "__main__":
    main()

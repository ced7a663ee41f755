"""What it costs that the ranks compare every call: the same calls with agreement on and off.

Two gloo ranks of one host, calls of 1 and of 65,536 float32 elements, or of those given. With
agreement every call meets the other rank first and compares operation, dtype, shape or splits,
reduce op and call site; what is at most 512 KiB of a rank travels in the control exchange itself,
which is what makes up for it. Without agreement (`AgreementPolicy(every=0)`) the data goes straight
to gloo. Blocks of calls alternate; every figure is the median over the rounds of time with / time
without, with the quartiles, for the worse of all_reduce and all_to_all with given splits. Then the
same calls against bare torch.distributed, for the record.

    python benchmarks/comm_collectives_agreement.py [elements ...]
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
from ranktest import run_ranks

RANKS = 2
ROUNDS, CALLS = 60, 30
SIZES = (1, 65_536)
ON, OFF = cc.AgreementPolicy(), cc.AgreementPolicy(every=0)


def timed(call: Callable[[], object]) -> float:
    """Seconds of CALLS calls, all ranks starting together."""
    call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return time.perf_counter() - started


def rank_main(sizes: tuple[int, ...]) -> dict[str, list[float]]:
    """Measure on one rank; returns the ratios of each round."""
    ratios: dict[str, list[float]] = {}
    for size in sizes:
        x, rows, out = torch.ones(size), torch.ones(RANKS * size), torch.empty(RANKS * size)
        splits = [size] * RANKS
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "all_reduce": (lambda x=x: cc.all_reduce(x), lambda x=x: dist.all_reduce(x.clone())),
            "all_to_all": (
                lambda rows=rows, s=splits: cc.all_to_all(rows, input_splits=s, output_splits=s),
                lambda rows=rows, out=out: dist.all_to_all_single(out, rows),
            ),
        }
        for _ in range(ROUNDS):
            for name, (ours, bare) in calls.items():
                cc.set_agreement(OFF)
                without = timed(ours)
                cc.set_agreement(ON)
                with_it = timed(ours)
                ratios.setdefault(f"{name}_{size}", []).append(with_it / without)
                ratios.setdefault(f"{name}_{size}_vs_torch", []).append(with_it / timed(bare))
    return ratios


def report(figure: str, values: list[float]) -> None:
    """Print the median and the quartiles of a figure."""
    low, middle, high = statistics.quantiles(values, n=4)
    spread = {"value": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    print(json.dumps({"figure": figure, **spread, "unit": "x", "n": len(values)}))


def main() -> None:
    """Print every figure; those of the claims last."""
    sizes = tuple(map(int, sys.argv[1:])) or SIZES
    ratios: Any = run_ranks(lambda rank, world_size: rank_main(sizes), RANKS, timeout_s=900)[0]
    for name, values in ratios.items():
        report(f"agreement_{name}", values)
    for size in sizes:
        both = [ratios[f"{name}_{size}"] for name in ("all_reduce", "all_to_all")]
        report(f"agreement_on_vs_off_{size}", max(both, key=statistics.median))


if __name__ == "__main__":
    main()

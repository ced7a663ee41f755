"""Heads without data between ranks of one host against the smallest exchange by gloo, in one run.

Ours: `Call.meet`, in which every rank sends every other one its call signature through shared
memory and compares theirs (and, for `parts`, 200 bytes to each). The peer: `all_to_all_single` of
torch.distributed for [ranks, 64] int64 on the CPU, which is what a call would need to tell its
peers the same. 2 and 4 gloo processes; rounds alternate; every figure is the median over rounds of
our time / gloo's, with the quartiles.

    python benchmarks/comm_collectives_heads.py [rounds]
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.call import Call
from comm_collectives.call.groups import group_state
from ranktest import run_ranks

ROUNDS, CALLS = 40, 200
PART, WORDS = bytes(200), 64


def seconds(step: Callable[[], object]) -> float:
    """Seconds of one `step`, all ranks starting together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        step()
    return (time.perf_counter() - started) / CALLS


def rank_main(world_size: int, rounds: int) -> dict[str, list[float]]:
    """Measure on one rank; returns the seconds of each round."""
    state = group_state(None)
    source = torch.zeros(world_size, WORDS, dtype=torch.int64)
    target = torch.empty_like(source)
    parts = [PART] * world_size
    times: dict[str, list[float]] = {"exchange": [], "exchange_with_parts": [], "gloo": []}
    for _ in range(rounds):
        times["exchange"].append(seconds(lambda: Call(state, "heads").meet()))
        times["exchange_with_parts"].append(seconds(lambda: Call(state, "heads").meet(parts=parts)))
        times["gloo"].append(seconds(lambda: dist.all_to_all_single(target, source)))
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else ROUNDS
    for ranks in (2, 4):
        found: Any = run_ranks(lambda rank, size: rank_main(size, rounds), ranks, timeout_s=600)
        times = found[0]
        for name in ("exchange", "exchange_with_parts"):
            ratios = [ours / gloo for ours, gloo in zip(times[name], times["gloo"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            values = {"value": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
            micros = {
                "ours_us": round(statistics.median(times[name]) * 1e6, 1),
                "gloo_us": round(statistics.median(times["gloo"]) * 1e6, 1),
            }
            figure = {"figure": f"heads_{name}_vs_gloo_{ranks}_ranks", **values, "unit": "x"}
            print(json.dumps({**figure, **micros, "n": len(ratios)}), flush=True)


if __name__ == "__main__":
    main()

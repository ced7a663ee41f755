"""A control exchange in the shared mailbox against the smallest exchange by gloo, in one run.

Ours: every rank posts 80 bytes that all read (and, for `parts`, 200 bytes to each peer), waits for
all and compares or reads what they said. The peer: `dist.all_to_all_single` of [ranks, 64] int64
on the CPU, which is what a call would need to tell its peers the same. 2 and 4 gloo processes;
rounds alternate; every figure is the median over rounds of our time / gloo's, with the quartiles.

    python benchmarks/comm_collectives_mailbox.py
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from comm_collectives.call.control import SharedMailbox
from ranktest import run_ranks

ROUNDS, CALLS, LIMIT_S = 40, 200, 30.0
COMMON, PART, WORDS = bytes(80), bytes(200), 64


def all_gather(message: bytes) -> list[bytes]:
    """What `SharedMailbox.open` needs: a message of each rank to all."""
    texts: list[Any] = [b""] * dist.get_world_size()
    dist.all_gather_object(texts, message)
    return texts


def seconds(step: Callable[[], object]) -> float:
    """Seconds of one `step`, all ranks starting together."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        step()
    return (time.perf_counter() - started) / CALLS


def rank_main(rank: int, world_size: int) -> dict[str, list[float]]:
    """Measure on one rank; returns the seconds of each round."""
    mailbox = SharedMailbox.open(rank, world_size, all_gather)
    if mailbox is None:
        raise RuntimeError("these ranks share no memory; nothing to measure")
    number = 0

    def meet(parts: list[bytes] | None) -> None:
        nonlocal number
        number += 1
        mailbox.post(number, COMMON, parts)
        if not (mailbox.wait(number, LIMIT_S).complete and mailbox.all_equal(number, COMMON)):
            raise RuntimeError(f"control exchange {number} failed")
        if parts is not None and mailbox.parts(number)[0][: len(PART)] != PART:
            raise RuntimeError(f"control exchange {number} moved wrong bytes")

    source = torch.zeros(world_size, WORDS, dtype=torch.int64)
    target = torch.empty_like(source)
    parts = [PART] * world_size
    times: dict[str, list[float]] = {"exchange": [], "exchange_with_parts": [], "gloo": []}
    for _ in range(ROUNDS):
        times["exchange"].append(seconds(lambda: meet(None)))
        times["exchange_with_parts"].append(seconds(lambda: meet(parts)))
        times["gloo"].append(seconds(lambda: dist.all_to_all_single(target, source)))
    return times


def main() -> None:
    for ranks in (2, 4):
        times: Any = run_ranks(rank_main, ranks, timeout_s=300)[0]
        for name in ("exchange", "exchange_with_parts"):
            ratios = [ours / gloo for ours, gloo in zip(times[name], times["gloo"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            values = {"value": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}
            micros = {
                "ours_us": round(statistics.median(times[name]) * 1e6, 1),
                "gloo_us": round(statistics.median(times["gloo"]) * 1e6, 1),
            }
            figure = {"figure": f"mailbox_{name}_vs_gloo_{ranks}_ranks", **values, "unit": "x"}
            print(json.dumps({**figure, **micros, "n": len(ratios)}))


if __name__ == "__main__":
    main()

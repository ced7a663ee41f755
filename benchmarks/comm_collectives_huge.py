"""Calls with more than 2^31 elements on two gloo ranks: every byte where it belongs.

One byte an element, so that counts of elements and of bytes both pass the range of 32-bit integers.
Each call is checked byte for byte in slices; seconds are those of rank 0 and memory the peak of its
process above what it held before, both for the record: no limit is set on them. Needs about 14 GiB.

    python benchmarks/comm_collectives_huge.py
"""

import functools
import json
import resource
import time
from collections.abc import Callable

import torch

from comm_collectives.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce_scatter,
    scatter,
)
from comm_collectives.collectives.drop_in import all_to_all_single
from comm_collectives.p2p import recv, send
from ranktest import run_ranks

HUGE = (1 << 31) + 5
PERIOD = 16_777_213  # prime, so that no offset of a power of two goes unnoticed
KIB_PER_GIB = 1 << 20


@functools.cache
def period(key: int) -> torch.Tensor:
    """Random bytes of a prime number, twice, so that a part of them may start anywhere."""
    generator = torch.Generator().manual_seed(key)
    row = torch.randint(0, 256, (PERIOD,), generator=generator, dtype=torch.uint8)
    return torch.cat([row, row])


def numbers(start: int, count: int, key: int) -> torch.Tensor:
    """Bytes start .. start + count, at most PERIOD, of the endless row of a key."""
    return period(key)[start % PERIOD :][:count]


def filled(count: int, key: int) -> torch.Tensor:
    """The first bytes of the row of a key."""
    x = torch.empty(count, dtype=torch.uint8)
    for start in range(0, count, PERIOD):
        x[start : start + PERIOD] = numbers(start, min(PERIOD, count - start), key)
    return x


def holds(x: torch.Tensor, key: int, skipped: int = 0) -> bool:
    """Whether a tensor has the bytes of the row of a key, from `skipped` on."""
    return all(
        torch.equal(piece, numbers(skipped + i * PERIOD, len(piece), key))
        for i, piece in enumerate(x.split(PERIOD))
    )


def exchange(rank: int) -> bool:
    sent = [[3, HUGE], [HUGE, 7]]
    y = all_to_all(filled(sum(sent[rank]), rank), input_splits=sent[rank])
    first, second = y.split([row[rank] for row in sent])
    skipped = [0, 0] if rank == 0 else [3, HUGE]
    return holds(first, 0, skipped[0]) and holds(second, 1, skipped[1])


def exchange_in_place(rank: int) -> bool:
    sent = [[HUGE, 2], [1, HUGE]]
    received = [row[rank] for row in sent]
    y = torch.zeros(sum(received), dtype=torch.uint8)
    all_to_all_single(y, filled(sum(sent[rank]), rank), received, sent[rank])
    first, second = y.split(received)
    skipped = [0, 0] if rank == 0 else [HUGE, 1]
    return holds(first, 0, skipped[0]) and holds(second, 1, skipped[1])


def gather_even(rank: int) -> bool:
    half = HUGE // 2 + 1
    parts = all_gather(filled(half, rank)).split(half)
    return all(holds(part, key) for key, part in enumerate(parts))


def gather_uneven(rank: int) -> bool:
    counts = [HUGE, 11]
    parts = all_gather(filled(counts[rank], rank)).split(counts)
    return all(holds(part, key) for key, part in enumerate(parts))


def reduce_all(rank: int) -> bool:
    """Each rank has the row in one half and zeros in the other."""
    x = filled(HUGE, 0)
    (x[: HUGE // 2] if rank else x[HUGE // 2 :]).zero_()
    return holds(all_reduce(x, op="max"), 0)


def reduce_apart(rank: int) -> bool:
    x = filled(HUGE + 9, 0)
    y = reduce_scatter(x, splits=[HUGE, 9], op="max")
    return holds(y, 0, HUGE if rank else 0)


def from_one(rank: int) -> bool:
    return holds(broadcast(filled(HUGE, 1) if rank == 1 else None, src=1), 1)


def to_one_and_back(rank: int) -> bool:
    parts = gather(filled([2, HUGE][rank], rank), dst=0)
    return holds(scatter(parts, src=0), rank)


def to_the_other(rank: int) -> bool:
    if rank == 0:
        send(filled(HUGE, 0), dst=1)
        return True
    return holds(recv(src=0), 0)


CALLS: dict[str, Callable[[int], bool]] = {
    "all_to_all": exchange,
    "all_to_all_single": exchange_in_place,
    "all_gather, even": gather_even,
    "all_gather, uneven": gather_uneven,
    "all_reduce": reduce_all,
    "reduce_scatter": reduce_apart,
    "broadcast": from_one,
    "gather and scatter": to_one_and_back,
    "send and recv": to_the_other,
}


def measure(name: str) -> dict[str, object]:
    """Run one call on two fresh ranks, so that peaks of memory are its own."""

    def fn(rank: int, world_size: int) -> tuple[bool, float, float]:
        period(0), period(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        right = CALLS[name](rank)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return right, time.perf_counter() - started, peak / KIB_PER_GIB

    outcomes = run_ranks(fn, 2, timeout_s=900)
    right = [outcome[0] for outcome in outcomes]  # type: ignore[index]
    _, seconds, peak_gib = outcomes[0]  # type: ignore[misc]
    return {"right": all(right), "seconds": round(seconds, 1), "peak_gib": round(peak_gib, 1)}


def main() -> None:
    right = 0
    for name in CALLS:
        figures = measure(name)
        right += bool(figures["right"])
        print(f"{name:20} {figures}", flush=True)
    spread = {"value": right, "low": right, "high": right, "unit": "calls", "n": len(CALLS)}
    print(json.dumps({"figure": "huge_calls_right", **spread}))


if __name__ == "__main__":
    main()

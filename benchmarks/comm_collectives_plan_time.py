"""The planner's cost model against the clock: sizes it was fitted to, and sizes it has not seen.

Two gloo ranks exchange bytes by `all_to_all`, 1 KiB to 64 MiB each way, without agreement: what is
small then goes over gloo too, as the rows of a dispatch do, and is no inline payload. Every
round times all sizes once, fitted and held-out ones in one shuffled order, so that both see the
same machine. The curve is fitted to the medians of the fitted sizes (a line per size class); the
peer is one alpha-beta line fitted to the same samples. Figures are medians over the held-out sizes
of |predicted / measured - 1|, with the quartiles over these sizes.

    python benchmarks/comm_collectives_plan_time.py
"""

import json
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.planning import CostCurve
from comm_collectives.planning.cost_model import fit_cost_model
from ranktest import run_ranks

RANKS, ROUNDS = 2, 30
FITTED = tuple(1 << power for power in range(10, 27))
# Between the fitted sizes, where in between by turns.
HELD_OUT = tuple(
    int(size * factor)
    for size, factor in zip(FITTED[:-1], (1.25, 1.5, 1.75) * len(FITTED), strict=False)
)
ROUND_BYTES = 1 << 22  # so many bytes are exchanged for one timing, in at most CALLS calls
CALLS = 50


def timed(buffer: torch.Tensor, size: int) -> float:
    """Seconds of one exchange of `size` bytes in each direction, ranks starting together."""
    calls = max(1, min(CALLS, ROUND_BYTES // size))
    splits = [size if peer != dist.get_rank() else 0 for peer in range(RANKS)]
    x = buffer[:size]
    cc.all_to_all(x, input_splits=splits, output_splits=splits)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        cc.all_to_all(x, input_splits=splits, output_splits=splits)
    return (time.perf_counter() - started) / calls


def rank_main(rank: int, world_size: int) -> dict[int, list[float]]:
    """Measure on one rank; returns each size's seconds, round by round."""
    cc.set_agreement(cc.AgreementPolicy(every=0))
    buffer = torch.randint(0, 255, (max(FITTED),), dtype=torch.uint8)
    seconds: dict[int, list[float]] = {size: [] for size in (*FITTED, *HELD_OUT)}
    for number in range(ROUNDS):
        order = list(seconds)
        random.Random(number).shuffle(order)  # the same order on every rank
        for size in order:
            seconds[size].append(timed(buffer, size))
    return seconds


def errors(curve: CostCurve, seconds: dict[int, list[float]]) -> list[float]:
    """Relative errors at the held-out sizes."""
    return [abs(curve.seconds(n) / statistics.median(seconds[n]) - 1) for n in HELD_OUT]


def main() -> None:
    seconds: Any = run_ranks(rank_main, RANKS, timeout_s=900)[0]
    samples = [(size, value) for size in FITTED for value in seconds[size]]
    by_class = errors(fit_cost_model(samples), seconds)
    one_line = errors(fit_cost_model(samples, max_lines=1), seconds)
    for figure, values in (
        ("plan_time_error_median", by_class),
        ("plan_time_error_median_of_one_line", one_line),
    ):
        low, middle, high = statistics.quantiles(values, n=4)
        fields = {"value": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
        print(json.dumps({"figure": figure, **fields, "unit": "ratio", "n": len(values)}))


if __name__ == "__main__":
    main()

"""Schedules on process groups in which transfers are done in order (NCCL).

`pair_order_accepted` is the share of tables that `check` finds free of deadlock there: every named
schedule and plans for 2 to 8 ranks; with an order for each pair of ranks and one for all of a
group; with one and with two communicators; when sends always wait for their receive, when one fits
in a buffer, and when all do.

`pair_order_faults_found` is the share of wrong tables that it refuses: schedules in which actions
have moved, that links would accept, and that an oracle calls wrong, which shares no code or
reasoning with it (packages/moe-pipeline/tests/schedules/table/test_pair_fifo.py). A right one that
it refuses fails the run. How the executor runs them is in packages/moe-pipeline/tests/executor/.

    python benchmarks/moe_pipeline_pair_order.py
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from loading import load_test

from moe_pipeline.schedules import StageCosts, plan
from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import Schedule, check

SEED = 0
ROOM = (0, 1, 10**6)


def tables(ranks: int, microbatches: Sequence[int], draw: Random) -> Iterator[Schedule]:
    """The named schedules and plans, also for unequal costs."""
    for count in microbatches:
        yield from (generate(ranks, count) for generate in SCHEDULES.values())
    for cap in (3, ranks, 2 * ranks):
        costs = [
            StageCosts(
                forward_s=draw.uniform(0.5, 2),
                input_gradient_s=draw.uniform(0.5, 2),
                weight_gradient_s=draw.uniform(0.2, 2),
                forward_transfer_s=draw.choice((0, 0.1, 0.7)),
            )
            for _ in range(2 * ranks)
        ]
        yield plan(costs, ranks, ranks + 2, memory_cap_bytes=cap + 2)


def report(figure: str, value: float, n: int, **more: object) -> None:
    """Print a figure."""
    line = {"figure": figure, "value": value, "unit": "share", "low": value, "high": value, "n": n}
    print(json.dumps({**line, **more}), flush=True)


def accept(ranks: Sequence[int], microbatches: Sequence[int]) -> None:
    """Report `pair_order_accepted`."""
    draw, count, refused = Random(SEED), 0, []
    settings = list(product(("pair_fifo", "group_fifo"), (1, 2), ROOM))
    for number in ranks:
        for table in tables(number, microbatches, draw):
            for edges, communicators, room in settings:
                count += 1
                if check(table, edges=edges, communicators=communicators, send_buffers=room):
                    refused.append(f"{table.name} on {number}, {edges} {communicators} {room}")
    report("pair_order_accepted", 1 - len(refused) / count, count, refused=refused[:10])


def find_faults(mutants: int) -> int:
    """Report `pair_order_faults_found`; returns how many right tables were refused."""
    test, draw = load_test("moe-pipeline", "schedules/table/test_pair_fifo"), Random(SEED)
    wrong = found = wronged = 0
    for generate in SCHEDULES.values():
        drawn = [generate(draw.randint(2, 4), draw.randint(3, 6)) for _ in range(mutants)]
        moved = [test.moved(table, draw) for table in drawn]
        for mutant in (mutant for mutant in moved if not check(mutant)):
            for edges, communicators in product(("pair_fifo", "group_fifo"), (1, 2)):
                problems = check(mutant, edges=edges, communicators=communicators)
                if test.is_ordered(mutant, communicators, edges=edges):
                    wronged += bool(problems)
                else:
                    wrong, found = wrong + 1, found + bool(problems)
    report("pair_order_faults_found", found / wrong, wrong, wronged=wronged)
    return wronged


def main(argv: Sequence[str] | None = None) -> int:
    """Print two JSON lines; 1 if a right table was refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 3, 8, 9, 16])
    parser.add_argument("--mutants", type=int, default=400, help="of each named schedule")
    given = parser.parse_args(argv)
    accept(given.ranks, given.microbatches)
    return 1 if find_faults(given.mutants) else 0


if __name__ == "__main__":
    sys.exit(main())

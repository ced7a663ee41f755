"""Mutants of every schedule, judged by checker and oracle; the legal ones are executed.

A mutant drops an action, repeats one, or swaps two of a rank. All mutants of a schedule are judged
when there are at most `--most`, otherwise so many drawn with a fixed seed. The oracle, which shares
no code or reasoning with the checker, stands in
packages/moe-pipeline/tests/schedules/table/test_checker.py. `illegal_mutants_rejected` is the share
of illegal mutants that the checker rejects; a legal one that it rejects fails the run.

Every legal mutant found there is run, all stages in one process and in fp64, as are `--moved`
mutants of each larger schedule, in which up to three actions of a rank have moved by up to three
places. `legal_mutants_exact` is the share of them whose gradients are within 1e-12 of those without
a pipeline. Runs on real ranks are in packages/moe-pipeline/tests/test_legal_mutants.py.

    python benchmarks/moe_pipeline_mutants.py
    python benchmarks/moe_pipeline_mutants.py --stages 3 --microbatches 3 --largest 4 8
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

from loading import load_test

from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import Schedule, check

SEED = 0


class Execution:
    """Runs mutants and counts those whose gradients are those of one process."""

    def __init__(self) -> None:
        self._test = load_test("moe-pipeline", "test_legal_mutants")
        self._expected = cache(self._test.expected_gradients)
        self.ran = self.exact = 0

    def run(self, mutant: Schedule) -> None:
        """Run one that the checker accepts; schedules without backward have nothing to compare."""
        if not mutant.has_backward:
            return
        expected = self._expected(SEED, mutant.num_stages, mutant.num_microbatches)
        difference = self._test.worst_difference(self._test.executed(SEED, mutant), expected)
        self.ran, self.exact = self.ran + 1, self.exact + (difference <= 1e-12)

    def moved(self, schedule: Schedule, count: int) -> list[Schedule]:
        """Legal mutants of a schedule in which actions have moved."""
        found: list[Schedule] = self._test.legal_mutants(schedule, Random(SEED), count)
        return found


def schedules(largest: Sequence[int], smallest: Sequence[int] = (0, 0)) -> Iterator[Schedule]:
    """Every schedule up to (stages on a rank of their own, microbatches), those within less out."""
    for generate in SCHEDULES.values():
        for ranks in range(1, largest[0] + 1):
            for microbatches in range(1, largest[1] + 1):
                if ranks > smallest[0] or microbatches > smallest[1]:
                    yield generate(ranks, microbatches)


def report(figure: str, value: float, n: int, **more: int) -> None:
    """Print a figure."""
    line = {"figure": figure, "value": value, "unit": "share", "low": value, "high": value, "n": n}
    print(json.dumps({**line, **more}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print two JSON lines; 1 if a legal mutant was rejected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--most", type=int, default=150, help="mutants of one schedule")
    parser.add_argument("--largest", type=int, nargs=2, default=[8, 32], help="of those executed")
    parser.add_argument("--moved", type=int, default=1, help="mutants of one larger schedule")
    given = parser.parse_args(argv)
    oracle, execution = load_test("moe-pipeline", "schedules/table/test_checker"), Execution()
    illegal = caught = legal = wronged = 0
    judged = (given.stages, given.microbatches)
    for schedule in schedules(judged):
        mutants = list(oracle.mutants(schedule))
        if len(mutants) > given.most:
            mutants = Random(SEED).sample(mutants, given.most)
        for mutant in mutants:
            rejected = bool(check(mutant))
            if not oracle.is_legal(mutant):
                illegal, caught = illegal + 1, caught + rejected
                continue
            legal, wronged = legal + 1, wronged + rejected
            if not rejected:
                execution.run(mutant)
    report("illegal_mutants_rejected", caught / illegal, illegal, legal=legal, wronged=wronged)
    for schedule in schedules(given.largest, judged):
        for mutant in execution.moved(schedule, given.moved):
            execution.run(mutant)
    report("legal_mutants_exact", execution.exact / execution.ran, execution.ran)
    return 1 if wronged else 0


if __name__ == "__main__":
    sys.exit(main())

"""The planner against every known schedule, against an exact solver, and its time.

- `planner_vs_known`: for 8 ranks, 16 microbatches, T_F = T_I = T_W and every memory cap, the
  planner's makespan over that of the best known schedule that fits; the largest ratio.
- `planner_optimal`: the share of all caps for up to 3 ranks and 4 microbatches at which an exact
  solver (packages/moe-pipeline/tests/schedules/test_planner.py) finds nothing faster.
- `planner_unequal_costs`: the planner's makespan over the least, as another exact solver there
  finds it, in 40 tiny cases whose stages differ in times, transfers and memory; the largest ratio.
- `planner_seconds`: processor time of a plan for 8 ranks and 32 microbatches; the longest of all
  caps.

    python benchmarks/moe_pipeline_planner.py
"""

import json
import sys
import time
from random import Random
from types import ModuleType

from loading import load_test

from moe_pipeline.schedules import plan
from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import StageCosts, simulate


def known(ranks: int, microbatches: int) -> list[tuple[float, float]]:
    """(peak, makespan) of the named schedules, in half stages of one stage on each rank."""
    found = []
    for generate in SCHEDULES.values():
        schedule = generate(ranks, microbatches)
        if schedule.has_backward:
            result = simulate(schedule, pair_saving_s=0.0)
            factor = 2 * ranks / schedule.num_stages
            found.append((max(result.peak_bytes) * factor, result.makespan_s * factor))
    return found


def against_known(ranks: int = 8, microbatches: int = 16) -> list[float]:
    peers = known(ranks, microbatches)
    ratios = []
    for cap in range(6, 2 * microbatches + 1):
        fitting = [makespan for peak, makespan in peers if peak <= cap]
        if fitting:
            planned = simulate(plan(StageCosts(), ranks, microbatches, cap)).makespan_s
            ratios.append(planned / min(fitting))
    return ratios


def optimal(solver: ModuleType) -> list[bool]:
    found = []
    for ranks in range(1, 4):
        for microbatches in range(1, 5):
            for cap in range(2, 2 * microbatches + 1):
                planned = plan(StageCosts(), ranks, microbatches, cap)
                slots = int(simulate(planned).makespan_s)
                found.append(not solver.can_end_by(ranks, microbatches, cap, slots - 1))
    return found


def seconds(ranks: int = 8, microbatches: int = 32) -> list[float]:
    times = []
    for cap in range(6, 2 * microbatches + 1, 2):
        start = time.process_time()
        plan(StageCosts(), ranks, microbatches, cap)
        times.append(time.process_time() - start)
    return times


def report(figure: str, value: float, unit: str, samples: list[float]) -> None:
    line = {"figure": figure, "value": value, "unit": unit, "n": len(samples)}
    print(json.dumps(line | {"low": min(samples), "high": max(samples)}))


def main() -> int:
    """Print a JSON line for each figure."""
    ratios = against_known()
    report("planner_vs_known", max(ratios), "x", ratios)
    solver = load_test("moe-pipeline", "schedules/test_planner")
    proven = [float(ok) for ok in optimal(solver)]
    report("planner_optimal", sum(proven) / len(proven), "share", proven)
    unequal = [solver.over_the_optimum(Random(number)) for number in range(40)]
    report("planner_unequal_costs", max(unequal), "x", unequal)
    times = seconds()
    report("planner_seconds", max(times), "s", times)
    return 0


if __name__ == "__main__":
    sys.exit(main())

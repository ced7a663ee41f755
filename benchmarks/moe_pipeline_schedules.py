"""Every named schedule up to 8 ranks and 32 microbatches: checked, and run by the simulator.

A schedule counts as right when the checker finds no problem with one send buffer for each link, the
simulator, which shares no code with it, runs it to its end, and each rank computes for as long as
its stages and microbatches ask. The peers' figures for 8 ranks and 16 microbatches stand in
packages/moe-pipeline/tests/schedules/table/test_simulator.py.

    python benchmarks/moe_pipeline_schedules.py
"""

import argparse
import json
import sys
from collections.abc import Sequence

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import Schedule, check, simulate


def is_right(schedule: Schedule) -> bool:
    """No problem, and all the work is done in the simulation."""
    try:
        found = simulate(schedule)
    except ScheduleError:
        return False
    slots = (3 if schedule.has_backward else 1) * schedule.num_stages * schedule.num_microbatches
    return not check(schedule, send_buffers=1) and sum(found.busy_s) == slots


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line; 1 if a schedule is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    arguments = parser.parse_args(argv)
    count = 0
    wrong = []
    for name, generate in SCHEDULES.items():
        for ranks in range(1, arguments.ranks + 1):
            for microbatches in range(1, arguments.microbatches + 1):
                count += 1
                if not is_right(generate(ranks, microbatches)):
                    wrong.append(f"{name} {ranks} x {microbatches}")
    share = 1 - len(wrong) / count
    line = {"figure": "schedules_accepted", "value": share, "unit": "share", "n": count}
    print(json.dumps(line | {"low": share, "high": share, "wrong": wrong[:10]}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""10,000 random programs under random faults over 8 to 64 simulated ranks, in two processes.

Every program is a few collectives (all_reduce, all_to_all, all_gather, reduce_scatter, gather,
scatter, broadcast, nested broadcast, dispatch and combine on three routes, asynchronous calls, and
their backwards), some with ranks that disagree in one of twelve ways or with transfers (some of
them mistakes: circles, other tags and tensors, against a call), under delays, kills, left out and
swapped calls, messages cut short and ranks without data. It is right if all surviving ranks
finish with the bits of an oracle that does not communicate, or all raise the same class of
CommError.

    python benchmarks/comm_collectives_fuzz.py [schedules] [seed]
"""

import json
import multiprocessing
import os
import sys
import time
from collections import Counter

from comm_collectives.simulation.fuzz import FuzzReport, fuzz

SCHEDULES, PROCESSES = 10_000, 2


def work(process: int, num_schedules: int, seed: int) -> FuzzReport:
    """Run one share, on a core of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= PROCESSES:
        os.sched_setaffinity(0, {cores[process]})
    # Who wakes another thread goes on until it waits: half of the switches between threads.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return fuzz(num_schedules, seed=seed)


def main() -> None:
    schedules = int(sys.argv[1]) if len(sys.argv) > 1 else SCHEDULES
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 1_000_000_000
    share = schedules // PROCESSES
    print(f"{share * PROCESSES} schedules from seed {seed}")
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        shares = [(i, share, seed + i * share) for i in range(PROCESSES)]
        reports = pool.starmap(work, shares)
    minutes = (time.monotonic() - started) / 60
    for report in reports:
        print(report)
    ran = sum(report.num_schedules for report in reports)
    right = sum(report.num_right for report in reports)
    endings = sum((report.endings for report in reports), Counter())
    figures = (
        ("fuzz_schedules_right", right, "schedules"),
        ("fuzz_schedules_finished", endings["finished"], "schedules"),
        ("fuzz_minutes", round(minutes * SCHEDULES / ran, 2), "min per 10,000"),
    )
    for figure, value, unit in figures:
        print(json.dumps({"figure": figure, "value": value, "unit": unit, "n": ran}))


if __name__ == "__main__":
    main()

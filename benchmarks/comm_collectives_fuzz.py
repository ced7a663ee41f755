"""10,000 random programs under random faults over 8 to 64 simulated ranks, in two processes.

Every program is a few collectives (all_reduce, all_to_all, all_gather, reduce_scatter, gather,
scatter, broadcast, nested broadcast, dispatch and combine on three routes, asynchronous calls, and
their backwards), some with ranks that disagree in one of twelve ways or with transfers (some of
them mistakes: circles, other tags and tensors, against a call), under delays, kills, left out and
swapped calls, messages cut short and ranks without data. It is right if all surviving ranks
finish with the bits of an oracle that does not communicate, or all raise the same class of
CommError.

Runs gather over days in `results/ledgers/`, each with its seed and a hash of the source that it
ran, since a simulation that is stuck once in a hundred thousand schedules is found by many runs.
All schedules count since the last run that was stuck or not right, those of older sources as well.

    python benchmarks/comm_collectives_fuzz.py [schedules] [seed]
    python benchmarks/comm_collectives_fuzz.py --runs 3     # three more runs, kept in the ledger
    python benchmarks/comm_collectives_fuzz.py --gathered   # only count those that are there
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ledgers import LEDGERS, ROOT, Ledger, source_of

from comm_collectives.simulation import SimulationStuckError
from comm_collectives.simulation.fuzz import FuzzReport, fuzz

SCHEDULES, PROCESSES = 10_000, 2
FILE = LEDGERS / "comm-collectives-fuzz.json"


@dataclass(frozen=True)
class Run:
    """What the schedules from one seed came to; `stuck` has the stacks of shares that ended so."""

    seed: int
    reports: Sequence[FuzzReport]
    stuck: Sequence[str]
    minutes: float

    @property
    def ran(self) -> int:
        return sum(report.num_schedules for report in self.reports)

    @property
    def right(self) -> int:
        return sum(report.num_right for report in self.reports)


def main(argv: Sequence[str] | None = None) -> int:
    """Run schedules once, or as often as wanted for the ledger, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schedules", type=int, nargs="?", default=SCHEDULES)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--runs", type=int, default=0, help="so many runs more for the ledger")
    parser.add_argument("--gathered", action="store_true", help="count the runs of the ledger")
    arguments = parser.parse_args(argv)
    if arguments.runs:
        add_runs(arguments.runs, arguments.schedules)
    if arguments.runs or arguments.gathered:
        entries = Ledger(FILE, "").entries().values()
        report("fuzz_schedules_in_a_row", in_a_row(entries), "schedules", len(entries))
        return 0
    done = run(arguments.schedules, arguments.seed)
    endings = sum((report.endings for report in done.reports), Counter())
    report("fuzz_schedules_right", done.right, "schedules", done.ran)
    report("fuzz_schedules_finished", endings["finished"], "schedules", done.ran)
    if done.ran:
        minutes = round(done.minutes * SCHEDULES / done.ran, 2)
        report("fuzz_minutes", minutes, "min per 10,000", done.ran)
    return 0


def add_runs(runs: int, schedules: int) -> None:
    """Run as often, and keep what each run came to.

    Raises:
        ValueError: the package's source is not that of a commit.
    """
    schedules -= schedules % PROCESSES
    for _ in range(runs):
        source = source_of(ROOT, "packages/comm-collectives/src")
        done = run(schedules, None)
        entry = {"right": done.right, "schedules": schedules, "stuck": list(done.stuck)}
        Ledger(FILE, source).keep(f"{int(time.time())} seed {done.seed}", entry)


def in_a_row(entries: Collection[dict[str, Any]]) -> int:
    """How many schedules there were since a run, the latest last, that was stuck or not right."""
    count = 0
    for entry in entries:
        good = entry["right"] == entry["schedules"] and not entry["stuck"]
        count = count + entry["schedules"] if good else 0
    return count


def run(schedules: int, seed: int | None) -> Run:
    """Run schedules in two processes, and print what they came to."""
    seed = time.time_ns() % 1_000_000_000 if seed is None else seed
    share = schedules // PROCESSES
    print(f"{share * PROCESSES} schedules from seed {seed}", flush=True)
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        ended = pool.starmap(work, [(i, share, seed + i * share) for i in range(PROCESSES)])
    for one in ended:
        print(one, flush=True)
    return Run(
        seed,
        [one for one in ended if isinstance(one, FuzzReport)],
        [one for one in ended if isinstance(one, str)],
        (time.monotonic() - started) / 60,
    )


def work(process: int, num_schedules: int, seed: int) -> FuzzReport | str:
    """Run one share, on a core of its own where there are enough; text if it was stuck."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= PROCESSES:
        os.sched_setaffinity(0, {cores[process]})
    # Who wakes another thread goes on until it waits: half of the switches between threads.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        return fuzz(num_schedules, seed=seed)
    except SimulationStuckError as error:
        return f"stuck: {error}"


def report(figure: str, value: float, unit: str, n: int) -> None:
    """Print a figure."""
    print(json.dumps({"figure": figure, "value": value, "unit": unit, "n": n}))


if __name__ == "__main__":
    sys.exit(main())

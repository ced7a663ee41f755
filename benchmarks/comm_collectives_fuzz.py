"""10,000 random programs under random faults over 8 to 64 simulated ranks, in two processes.

Every program is a few collectives (all_reduce, all_to_all, all_gather, reduce_scatter, gather,
scatter, broadcast, nested broadcast, dispatch and combine on three routes, asynchronous calls, and
their backwards), some with ranks that disagree in one of twelve ways or with transfers (some of
them mistakes: circles, other tags and tensors, against a call), under delays, kills, left out and
swapped calls, messages cut short and ranks without data. It is right if all surviving ranks
finish with the bits of an oracle that does not communicate, or all raise the same class of
CommError.

Runs gather over days in `results/ledgers/`, each with its seed and a hash of the program that it
ran, since a simulation that is stuck once in a hundred thousand schedules is found by many runs.
Runs of today's program count, since the last one that was stuck or not right. Today's program is
what Python reads (no comments, no docstrings) in the files of the package that the fuzzer imports,
but for those in which schedules run nothing (`NOT_RUN`): other changes void no run.

    python benchmarks/comm_collectives_fuzz.py [schedules] [seed]
    python benchmarks/comm_collectives_fuzz.py --runs 3     # three more runs, kept in the ledger
    python benchmarks/comm_collectives_fuzz.py 2000 --runs 150    # 300,000 in pieces of 2 minutes
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
from pathlib import Path
from typing import Any

from ledgers import LEDGERS, Ledger, program_of

import comm_collectives
from comm_collectives.simulation import SimulationStuckError
from comm_collectives.simulation.fuzz import FuzzReport, fuzz

SCHEDULES, PROCESSES = 10_000, 2
FILE = LEDGERS / "comm-collectives-fuzz.json"
SOURCE = Path(comm_collectives.__file__).parent
# What the fuzzer imports, and of which no schedule runs a function: streams of real ranks, devices
# that are silent, torch's names, plans, and what follows a violation.
NOT_RUN = (
    "base/streams/shared.py",
    "base/streams/sockets.py",
    "base/transport/shm_region.py",
    "call/devices/flight_record.py",
    "call/devices/reports.py",
    "call/devices/verdict.py",
    "call/groups/wire_count.py",
    "collectives/buckets.py",
    "collectives/overlap.py",
    "collectives/drop_in/lists.py",
    "collectives/drop_in/patching.py",
    "collectives/drop_in/reductions.py",
    "collectives/drop_in/swapped.py",
    "collectives/drop_in/torch_order.py",
    "moe/deepep",
    "p2p/devices.py",
    "planning/cost_model.py",
    "planning/plan_command.py",
    "planning/planner.py",
    "planning/topology.py",
    "planning/wire_bytes.py",
    "planning/workload.py",
    "simulation/alone.py",
    "simulation/faults/shrinking.py",
)


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
        entries = gathered()
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
        ValueError: the program has changed meanwhile.
    """
    schedules -= schedules % PROCESSES
    ledger = Ledger(FILE, program())
    for _ in range(runs):
        done = run(schedules, None)
        if program() != ledger.source:
            raise ValueError("the package has changed while schedules ran; run them anew")
        stuck = [text.partition("; saved in")[0] for text in done.stuck]  # the file has the stacks
        entry = {"right": done.right, "schedules": schedules, "stuck": stuck}
        ledger.keep(f"{int(time.time())} seed {done.seed}", entry)


def gathered() -> list[dict[str, Any]]:
    """The runs of today's program, the latest last; says how many there are of others."""
    ledger = Ledger(FILE, program())
    today = ledger.of_today()
    others = len(ledger.entries()) - len(today)
    if others:
        print(f"of another program, so these runs count for nothing: {others}", flush=True)
    return list(today.values())


def program() -> str:
    """Return the hash of what schedules run."""
    return program_of(SOURCE, [SOURCE / name for name in imported() if not is_left_out(name)])


def imported() -> list[str]:
    """The package's files that this process has imported, which are those of the fuzzer."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == SOURCE.name]
    files = {Path(module.__file__) for module in modules if module.__file__}
    return sorted(file.relative_to(SOURCE).as_posix() for file in files)


def is_left_out(name: str) -> bool:
    """Whether a file is in NOT_RUN, or in a folder there."""
    return any(name == left or name.startswith(f"{left}/") for left in NOT_RUN)


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

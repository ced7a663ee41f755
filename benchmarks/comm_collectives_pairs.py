"""Every pair of different public calls ends in the same named error on every rank, within 2 s.

2, 3 and 4 ranks, on one host and across hosts (ranks with a /dev/shm of their own), default policy,
after a warm-up: every ordered pair of calls, with and without gradients, asynchronous and backward,
three-way disagreements, the same call with other arguments, errors inside backwards and experts,
skipped steps; every transfer between two ranks against every call, and receives against receives.
A cell is right if every rank raises MismatchError with ranks, call number, file and line within
2 s, and the group works afterwards. Beside other work, time in which one rank had no processor
comes on top of the 2 s (the kernel's `run delay`, which is nothing on an idle machine). Runs the
code of the package's test.

All cells are run in parts. What a part came to is kept in `results/ledgers/`, with a hash of what
decides how cells end: what Python reads in the test and in the package but for the simulator. Parts
of another source count for nothing, which is said. So a run that was cut short goes on where it
was, parts may run at once, and the figure of all cells is printed once all parts are there.

    python benchmarks/comm_collectives_pairs.py                    # the parts that are missing
    python benchmarks/comm_collectives_pairs.py --part 3/8         # this one
    python benchmarks/comm_collectives_pairs.py --sample 100 [--ranks 2 3 4] [--transfers]
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ledgers import LEDGERS, ROOT, Ledger, program_of
from loading import load_test

WITHIN_S = 2.0
TRIPLES = 200
PARTS = 8
AT_ONCE = 3  # groups in transfers, which do little but wait for half a second
PACKAGE = ROOT / "packages/comm-collectives"
FILE = LEDGERS / "comm-collectives-pairs.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print what ended badly, then the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sample", type=int, default=None, help="pairs of each configuration")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--transfers", action="store_true", help="only cells with a transfer")
    parser.add_argument("--places", nargs="+", default=None, help="'one host', 'across hosts'")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--part", default=None, help="I/N: every N-th cell, from the I-th")
    arguments = parser.parse_args(argv)
    chosen = [arguments.sample, arguments.only, arguments.transfers, arguments.places]
    if any(chosen) or arguments.ranks != [2, 3, 4] or arguments.seed is not None:
        if arguments.part is not None:
            parser.error("--part is of all cells; leave the other options out")
        seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
        print(f"seed {seed}")
        total, bad = run(configurations(arguments, seed))
        report(total, bad.values())
        return 0
    part, _, parts = (arguments.part or f"0/{PARTS}").partition("/")
    try:
        run_parts(arguments, int(part), int(parts))
    except ValueError as error:
        parser.error(str(error))
    return 0


def configurations(
    arguments: argparse.Namespace, seed: int
) -> Iterator[tuple[int, str, list[Any]]]:
    """Number of ranks, place and cells of each run; the same for the same seed."""
    tests, chance = load_test("comm-collectives", "test_pairs"), random.Random(seed)
    for size in arguments.ranks:
        for place in arguments.places or (tests.ONE_HOST, tests.ACROSS_HOSTS):
            cells = tests.pairs(size) + tests.transfers(size)
            if arguments.sample is not None:
                cells = chance.sample(cells, arguments.sample)
            cells += tests.triples(size, min(TRIPLES, len(cells) // 5), chance) + tests.ways(size)
            if arguments.transfers:
                cells = tests.transfers(size)
            yield size, place, [cell for cell in cells if arguments.only in cell.name]


def run(cells_of: Iterator[tuple[int, str, list[Any]]]) -> tuple[int, dict[str, str]]:
    """Run cells; return how many there were, and what was wrong with those that ended badly."""
    transfers = load_test("comm-collectives", "test_pairs").TRANSFERS.keys()
    problems: dict[str, str] = {}
    total = 0
    with ProcessPoolExecutor(AT_ONCE, mp_context=get_context("spawn")) as pool:
        for size, place, cells in cells_of:
            started = time.monotonic()
            plain = [(cell.calls, cell.rows) for cell in cells]  # for other processes
            moving = [one for one in plain if transfers & set(one[0])]
            bad = bad_of([one for one in plain if not transfers & set(one[0])], place)
            shares = [moving[i::AT_ONCE] for i in range(min(AT_ONCE, len(moving)))]
            for found in pool.map(bad_of, shares, [place] * len(shares)):
                bad += found
            for name, problem in bad:
                problems[f"{size} ranks, {place}: {name}"] = problem[:600]
                print(f"{size} ranks, {place}: {name}\n    {problem[:600]}", flush=True)
            took = f"{time.monotonic() - started:.0f} s"
            print(
                f"== {size} ranks, {place}: {len(cells)} cells, bad: {len(bad)} ({took})",
                flush=True,
            )
            total += len(cells)
    return total, problems


def bad_of(plain: Sequence[tuple[tuple[str, ...], int]], place: str) -> list[tuple[str, str]]:
    """Run cells of one number of ranks; return the names of those that ended badly, and how."""
    tests = load_test("comm-collectives", "test_pairs")
    cells = [tests.Cell(calls, rows) for calls, rows in plain]
    ended = tests.run_cells(cells, place, within_s=WITHIN_S)
    return [(cell.name, problem) for cell, problem in ended if problem]


def run_parts(arguments: argparse.Namespace, part: int, parts: int) -> None:
    """Run one part, or (0) all that are missing, and keep what they came to.

    Raises:
        ValueError: there is no such part, or the source has changed meanwhile.
    """
    if not 0 <= part <= parts or parts < 1:
        raise ValueError(f"--part {part}/{parts}: give I/N with 1 <= I <= N")
    ledger = Ledger(FILE, source())
    wanted = [part] if part else missing(ledger, parts)
    for number in wanted:
        started = time.monotonic()
        cells_of = (
            (size, place, cells[number - 1 :: parts])
            for size, place, cells in configurations(arguments, parts)
        )
        total, bad = run(cells_of)
        took_s = round(time.monotonic() - started)
        if source() != ledger.source:
            raise ValueError(f"the source has changed while part {number}/{parts} ran; run it anew")
        ledger.keep(f"{number}/{parts}", {"cells": total, "bad": bad, "seconds": took_s})
        print(f"== part {number}/{parts}: {total} cells in {took_s} s", flush=True)
    if not missing(ledger, parts):
        done = [ledger.of_today()[f"{i}/{parts}"] for i in range(1, parts + 1)]
        report(sum(one["cells"] for one in done), [p for one in done for p in one["bad"].values()])


def missing(ledger: Ledger, parts: int) -> list[int]:
    """The parts that are not there, which is said with those that are of another source."""
    known, today = ledger.entries(), ledger.of_today()
    lacks = [i for i in range(1, parts + 1) if f"{i}/{parts}" not in today]
    other = [i for i in lacks if f"{i}/{parts}" in known]
    if other:
        print(f"of another source, so these parts count for nothing: {listed(other)}", flush=True)
    if lacks:
        print(f"missing of {parts} parts: {listed(lacks)}", flush=True)
    return lacks


def listed(numbers: Sequence[int]) -> str:
    """The numbers, for people."""
    return ", ".join(map(str, numbers))


def source() -> str:
    """Return the hash of what decides how cells end."""
    files = [f for f in (PACKAGE / "src").rglob("*.py") if "simulation" not in f.parts]
    return program_of(ROOT, [*files, PACKAGE / "tests/test_pairs.py"])


def report(total: int, problems: Collection[str]) -> None:
    """Print the counts."""
    kinds = Counter(problem.partition(":")[0] for problem in problems)
    for figure, count in [*kinds.items(), ("bad", len(problems))]:
        print(
            json.dumps({"figure": f"pairs_{figure}", "value": count, "unit": "cells", "n": total})
        )


if __name__ == "__main__":
    sys.exit(main())

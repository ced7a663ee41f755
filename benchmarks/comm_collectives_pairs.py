"""Every pair of different public calls ends in the same named error on every rank, within 2 s.

2, 3 and 4 ranks, on one host and across hosts (ranks with a /dev/shm of their own), default policy,
after a warm-up: every ordered pair of calls, with and without gradients, asynchronous and backward,
three-way disagreements, the same call with other arguments, errors inside backwards and experts,
skipped steps; every transfer between two ranks against every call, and receives against receives.
A cell is right if every rank raises MismatchError with ranks, call number, file and line within
2 s, and the group works afterwards. Runs the code of the package's test.

    python benchmarks/comm_collectives_pairs.py [--sample 100] [--ranks 2 3 4] [--transfers]
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

from loading import load_test

WITHIN_S = 2.0
TRIPLES = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print what ended badly, then the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--sample", type=int, default=None, help="pairs of each configuration")
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--transfers", action="store_true", help="only cells with a transfer")
    parser.add_argument("--places", nargs="+", default=None, help="'one host', 'across hosts'")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    arguments = parser.parse_args(argv)
    tests = load_test("comm-collectives", "test_pairs")
    chance = random.Random(arguments.seed)
    print(f"seed {arguments.seed}")
    kinds: Counter[str] = Counter()
    total = 0
    for size in arguments.ranks:
        for place in arguments.places or (tests.ONE_HOST, tests.ACROSS_HOSTS):
            cells = tests.pairs(size) + tests.transfers(size)
            if arguments.sample is not None:
                cells = chance.sample(cells, arguments.sample)
            cells += tests.triples(size, min(TRIPLES, len(cells) // 5), chance) + tests.ways(size)
            if arguments.transfers:
                cells = tests.transfers(size)
            cells = [cell for cell in cells if arguments.only in cell.name]
            here: Counter[str] = Counter()
            started = time.monotonic()
            for cell, problem in tests.run_cells(cells, place, within_s=WITHIN_S):
                if problem:
                    here[problem.partition(":")[0]] += 1
                    print(f"{size} ranks, {place}: {cell.name}\n    {problem[:600]}", flush=True)
            bad = ", ".join(f"{n} {kind}" for kind, n in here.most_common()) or "none"
            took = f"{time.monotonic() - started:.0f} s"
            print(f"== {size} ranks, {place}: {len(cells)} cells, bad: {bad} ({took})", flush=True)
            kinds += here
            total += len(cells)
    bad_cells = sum(kinds.values())
    for kind, count in kinds.items():
        print(json.dumps({"figure": f"pairs_{kind}", "value": count, "unit": "cells", "n": total}))
    print(json.dumps({"figure": "pairs_bad", "value": bad_cells, "unit": "cells", "n": total}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

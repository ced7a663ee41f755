"""Simulated power loss of unified-ckpt: the recorded file system calls, replayed at every prefix.

Runs the code of the package's test with large counts. Two real ranks save new names, overwrite
(with and without the exchange of names) and rotate. After every call, states are made in which what
was not yet fsynced is dropped, kept, or kept at random, writes torn; each must be exactly the old
or the new one, and a sample is put on a real disk, cleaned and verified. A reader that opened a
checkpoint after any call must see the same, or less, after all later ones. As a proof that the
check can fail, each fsync of the record is then left out by itself, and each kind of them.

    python benchmarks/unified_ckpt_power_loss.py --rounds 5 --random 20
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from loading import load_test


def report(figure: str, value: float, unit: str, n: int) -> None:
    line = {"figure": figure, "value": value, "low": value, "high": value, "unit": unit, "n": n}
    print(json.dumps(line), flush=True)


def recover_some(test: ModuleType, events: list, root: Path, rng: random.Random) -> int:
    """Put a sample of the states on a real disk; return how many were not recovered."""
    bad = 0
    for _, state, expected in test.losses(events, root, rng, 1):
        if rng.random() < 0.1:
            with tempfile.TemporaryDirectory(prefix="unified-ckpt-lost-") as folder:
                try:
                    test.recover(state, expected, Path(folder))
                except (AssertionError, OSError, RuntimeError, ValueError) as error:
                    bad += 1
                    print(f"not recovered: {error}", file=sys.stderr)
    return bad


def canaries(test: ModuleType, events: list, root: Path, rng: random.Random) -> tuple[int, int]:
    """Leave out fsyncs one by one; return how many the check noticed, and how many."""
    kinds = test.kinds_of_syncs(events)
    noticed = 0
    for left_out in kinds:
        fewer = [event for event in events if event is not left_out]
        noticed += any(test.problems(fewer, root, rng, 4))
    return noticed, len(kinds)


def main(argv: Sequence[str] | None = None) -> int:
    """Record and replay; print bad states and the fsyncs whose absence was noticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="recordings per scenario")
    parser.add_argument("--random", type=int, default=20, help="random states per call")
    arguments = parser.parse_args(argv)
    test = load_test("unified-ckpt", "test_power_loss")
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    readings = mixed = 0
    states = bad = unseen_kinds = noticed = syncs = 0
    for number in range(arguments.rounds * len(test.SCENARIOS)):
        scenario = test.SCENARIOS[number % len(test.SCENARIOS)]
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-power-") as folder:
            root = Path(folder)
            events = test.record(root, scenario)
        for problem in test.problems(events, root, rng, arguments.random):
            states += 1
            if problem is not None:
                bad += 1
                print(f"seed {seed}, {scenario}: {problem}", file=sys.stderr)
        for problem in test.readers_problems(events, root):
            readings += 1
            if problem is not None:
                mixed += 1
                print(f"{scenario}: {problem}", file=sys.stderr)
        bad += recover_some(test, events, root, rng)
        kinds = test.kinds_of_syncs(events)
        for kind in test.SYNCS:
            fewer = [event for event in events if kinds.get(event) != kind]
            unseen_kinds += not any(test.problems(fewer, root, rng, 4))
        if number < len(test.SCENARIOS):
            found, tried = canaries(test, events, root, rng)
            noticed, syncs = noticed + found, syncs + tried
    report("unified_ckpt_power_loss_bad", bad, "states", states)
    report("unified_ckpt_power_loss_mixed_readings", mixed, "readings", readings)
    report("unified_ckpt_power_loss_unseen_canaries", unseen_kinds, "kinds", 3 * arguments.rounds)
    report("unified_ckpt_power_loss_single_fsyncs_noticed", noticed / syncs, "share", syncs)
    return 0


if __name__ == "__main__":
    sys.exit(main())

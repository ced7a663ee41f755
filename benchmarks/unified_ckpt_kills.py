"""Kill ranks of unified-ckpt with SIGKILL at random moments, a thousand times; count what is lost.

Runs the code of the package's test with large counts: saves, overwrites and rotation on two real
ranks; one of them, all of them, or the background saver of one (every tenth kill, since its start
takes seconds) is killed from outside. A state counts as lost when a checkpoint that a save
had returned is gone, mixed, or damaged, or when the next save does not work or leaves rubbish.
All the while a third process loads random boxes of what is there: a reader counts as bad when a
load is mixed, older than the one before, or ends in another error than "was replaced".

    python benchmarks/unified_ckpt_kills.py --kills 1000
    python benchmarks/unified_ckpt_kills.py --kills 100 --target "one saver"
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loading import load_test


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kills and print the number of lost states as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="replay the kills of one seed")
    parser.add_argument("--target", default=None, help="one rank, all ranks or one saver")
    arguments = parser.parse_args(argv)
    kills = load_test("unified-ckpt", "test_kills")
    if arguments.target is not None and arguments.target not in kills.MODES:
        parser.error(f"--target {arguments.target!r} is not one of {', '.join(kills.MODES)}")
    seeds = [random.randrange(2**32) for _ in range(arguments.kills)]
    if arguments.seed is not None:
        seeds = [arguments.seed]
    lost = bad = loads = replaced = 0
    for number, seed in enumerate(seeds):
        mode = arguments.target or ("one saver" if seed % 10 == 0 else kills.MODES[seed % 2])
        overwrite = bool(seed // 10 % 2)
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-kills-") as folder:
            try:
                seen = kills.run_and_kill(Path(folder), mode, seed, overwrite=overwrite)
                loads, replaced = loads + seen.loads, replaced + seen.replaced
                if seen.problem:
                    bad += 1
                    print(f"seed {seed} ({mode}, reader): {seen.problem}", file=sys.stderr)
                kills.check_after_kill(Path(folder))
            except (AssertionError, RuntimeError, OSError, ValueError) as error:
                lost += 1
                print(f"seed {seed} ({mode}, overwrite={overwrite}): {error}", file=sys.stderr)
        if (number + 1) % 100 == 0:
            print(f"{number + 1} kills, {lost} lost, {bad} bad readers", file=sys.stderr)
    report("unified_ckpt_lost", lost, "states", len(seeds))
    report("unified_ckpt_kills_bad_readers", bad, "readers", len(seeds))
    report("unified_ckpt_kills_loads", loads, "loads", len(seeds))
    report("unified_ckpt_kills_told_to_read_again", replaced, "loads", len(seeds))
    return 0


def report(figure: str, value: int, unit: str, n: int) -> None:
    line = {"figure": figure, "value": value, "low": value, "high": value, "unit": unit, "n": n}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Kill ranks of unified-ckpt with SIGKILL at random moments, a thousand times; count what is lost.

Runs the code of the package's test with large counts: saves, overwrites and rotation on two real
ranks; one of them, all of them, or the background saver of one (every tenth kill, since its start
takes seconds) is killed from outside. A state counts as lost when a checkpoint that a save
had returned is gone, mixed, or damaged, or when the next save does not work or leaves rubbish.

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
    lost = 0
    for number, seed in enumerate(seeds):
        mode = arguments.target or ("one saver" if seed % 10 == 0 else kills.MODES[seed % 2])
        overwrite = bool(seed // 10 % 2)
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-kills-") as folder:
            try:
                kills.run_and_kill(Path(folder), mode, seed, overwrite=overwrite)
                kills.check_after_kill(Path(folder))
            except (AssertionError, RuntimeError, OSError, ValueError) as error:
                lost += 1
                print(f"seed {seed} ({mode}, overwrite={overwrite}): {error}", file=sys.stderr)
        if (number + 1) % 100 == 0:
            print(f"{number + 1} kills, {lost} lost", file=sys.stderr)
    n = len(seeds)
    figure = {"figure": "unified_ckpt_lost", "value": lost, "unit": "states", "n": n}
    print(json.dumps({**figure, "low": lost, "high": lost}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

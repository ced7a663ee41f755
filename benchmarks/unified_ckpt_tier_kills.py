"""Kill all ranks of one node with its memory, again and again; count the states that are lost.

Runs the code of the package's test with large counts: three nodes of one, two and one ranks save in
the tier of the nodes; one of them is killed with SIGKILL, half of the times at a phase by name and
else at a random moment, its memory is removed, and the job starts again with a fresh node. A run
counts as bad when a rank gets anything but a whole state, to the bit, or when more steps are lost
than the recovery goal of the plan says.

    python benchmarks/unified_ckpt_tier_kills.py --kills 200
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
    """Run the kills and print the number of bad runs as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="replay the kill of one seed")
    arguments = parser.parse_args(argv)
    kills = load_test("unified-ckpt", "test_tier_kills")
    seeds = [random.randrange(2**32) for _ in range(arguments.kills)]
    if arguments.seed is not None:
        seeds = [arguments.seed]
    bad = 0
    for number, seed in enumerate(seeds):
        rng = random.Random(seed)
        victim = rng.choice("abc")
        phase = rng.choice([None, rng.choice(kills.PHASES)])
        delay_s = rng.uniform(0.0, 0.3)
        with (
            tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-", dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(prefix="unified-ckpt-tier-") as told,
        ):
            places = Path(memory), Path(told)
            try:
                kills.train_until_killed(*places, phase=phase, delay_s=delay_s, victim=victim)
                kills.check_resume(*places, victim)
            except (AssertionError, RuntimeError, OSError, ValueError) as error:
                bad += 1
                print(f"seed {seed} ({victim} at {phase or delay_s}): {error}", file=sys.stderr)
        if (number + 1) % 50 == 0:
            print(f"{number + 1} kills, {bad} bad", file=sys.stderr)
    counts = {"value": bad, "low": bad, "high": bad, "unit": "runs", "n": len(seeds)}
    print(json.dumps({"figure": "unified_ckpt_tier_kills_bad", **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ten thousand random bit flips and truncations of unified-ckpt: all must be found and named.

Runs the code of the package's test with large counts, on a checkpoint with files of one and of two
writers, indexes and other files. `verify_checkpoint` must name the file and, inside a tensor, its
key and bytes that hold the damaged one; loading everything must raise with the same file and key.

    python benchmarks/unified_ckpt_flips.py --count 10000
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
    """Damage and look; print how many were not found or not named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    arguments = parser.parse_args(argv)
    test = load_test("unified-ckpt", "test_damage")
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-flips-") as folder:
        damage = test.Damage(test.make(Path(folder)))
        for _ in range(arguments.count):
            problem = damage.once(rng)
            if problem is not None:
                missed += 1
                print(f"seed {seed}: {problem}", file=sys.stderr)
    figure = {"figure": "unified_ckpt_flips_missed", "value": missed, "unit": "flips"}
    print(json.dumps({**figure, "low": missed, "high": missed, "n": arguments.count}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill conversions with SIGKILL at random moments, resume them, and count what is lost.

Runs the code of the package's test with large counts: half of the kills at a random byte of a tiny
model, half from outside at a random time of one of 38 MB; some of either use their source up
(`--move`), and some of the former compute (`--dtype float32`). A kill counts as lost when the
target was there too early, the resumed files differ from those of an uninterrupted run, more than a
chunk (or a computed tensor) was written twice, or anything else was left.

    python benchmarks/weight_convert_kills.py --kills 50
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from loading import PACKAGES, load_test


def main() -> int:
    """Run the kills and print the number of lost ones as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="replay the kill of one seed")
    arguments = parser.parse_args()
    sys.path.insert(0, str(PACKAGES / "weight-convert" / "src"))
    kills = load_test("weight-convert", "run/test_execution")
    models = load_test("weight-convert", "conftest")
    seeds = [random.randrange(2**32) for _ in range(arguments.kills)]
    if arguments.seed is not None:
        seeds = [arguments.seed]
    tiny, large = models.make_model(num_layers=3), models.make_model(h=1024, d=512)
    lost, twice = 0, []
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="weight-convert-kills-") as folder:
            try:
                if seed % 2:
                    dtype = "float32" if seed % 4 == 1 else None
                    kills.kill_and_resume(Path(folder), tiny, seed, dtype=dtype)
                else:
                    started_s = time.perf_counter()
                    large.write(Path(folder) / "timing", "fused")
                    wall_s = time.perf_counter() - started_s
                    twice.append(kills.kill_and_resume(Path(folder), large, seed, by_time_s=wall_s))
            except (AssertionError, RuntimeError, OSError, ValueError) as error:
                lost += 1
                print(f"seed {seed}: {error}", file=sys.stderr)
    figure = {"figure": "weight_convert_lost", "value": lost, "unit": "kills", "n": len(seeds)}
    print(f"written twice at most: {max(twice, default=0):,} bytes", file=sys.stderr)
    print(json.dumps(figure | {"low": lost, "high": lost}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill ranks that save to a store, while another process loads; count what is lost or mixed.

Runs the code of the package's test with large counts: over a folder behind injected faults (torn
writes, delays, lost and late requests, old listings), and over a server that speaks S3; each with
saves of one name, and with runs whose manager rotates, in turn.

    python benchmarks/unified_ckpt_storage_kills.py --kills 200
    python benchmarks/unified_ckpt_storage_kills.py --kind faults --seed 7
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loading import load_test
from unified_ckpt_object_store import BUCKET, start_server


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kills and print the number of lost states as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="replay the kill of one seed")
    parser.add_argument("--kind", default=None, help="faults, s3, 'faults run' or 's3 run'")
    arguments = parser.parse_args(argv)
    kills = load_test("unified-ckpt", "test_storage_kills")
    if arguments.kind is not None and arguments.kind not in kills.KINDS:
        parser.error(f"--kind {arguments.kind!r} is not one of {', '.join(kills.KINDS)}")
    seeds = [random.randrange(2**32) for _ in range(arguments.kills)]
    if arguments.seed is not None:
        seeds = [arguments.seed]
    server = start_server(moto=True)
    lost, seen = 0, {"whole": 0, "named error": 0}
    for number, seed in enumerate(seeds):
        kind = arguments.kind or kills.KINDS[number % len(kills.KINDS)]
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-kills-") as folder:
            place = f"s3://{BUCKET}" if "s3" in kind else f"{folder}/store"
            try:
                counts = kills.try_seed(kind, place, Path(folder) / "run", seed)
                seen = {name: seen[name] + counts[name] for name in seen}
            except AssertionError as error:
                lost += 1
                print(error, file=sys.stderr)
        if (number + 1) % 20 == 0:
            print(f"{number + 1} kills, {lost} lost, loads: {seen}", file=sys.stderr)
    server.close()
    n = len(seeds)
    figure = {"figure": "unified_ckpt_storage_lost", "value": lost, "unit": "states", "n": n}
    print(json.dumps({**figure, "low": lost, "high": lost}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

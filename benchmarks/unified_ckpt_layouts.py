"""Move a small MoE training state between random pairs of layouts, bit for bit; count the bytes.

Runs the code of the package's test with large counts: 1 to 4 real ranks on either side, tensor,
pipeline, expert, expert-tensor and data parallel, flat and row sharding, uneven experts. The second
figure is bytes read over the unique bytes that a rank asked for, the worst rank of all pairs.

    python benchmarks/unified_ckpt_layouts.py --pairs 500
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
    """Run the pairs and print failures and the worst ratio of bytes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--scale", type=int, default=8, help="factor of the tensors' sizes")
    parser.add_argument("--seed", type=int, default=None, help="replay one pair")
    arguments = parser.parse_args(argv)
    seeds = [random.randrange(2**32) for _ in range(arguments.pairs)]
    if arguments.seed is not None:
        seeds = [arguments.seed]
    pairs = load_test("unified-ckpt", "test_layout_pairs")
    failures, ratios = 0, []
    for number, seed in enumerate(seeds):
        with tempfile.TemporaryDirectory(prefix="unified-ckpt-layouts-") as folder:
            try:
                target = Path(folder) / "checkpoint-1"
                ratios.append(pairs.run_pair(seed, target, scale=arguments.scale))
            except (RuntimeError, ValueError, AssertionError) as error:
                failures += 1
                print(f"seed {seed}: {error}", file=sys.stderr)
        if (number + 1) % 50 == 0:
            print(f"{number + 1} pairs, {failures} failures", file=sys.stderr)
    n = len(seeds)
    report = {"figure": "unified_ckpt_layout_failures", "value": failures, "unit": "pairs", "n": n}
    print(json.dumps({**report, "low": failures, "high": failures}))
    worst = round(max(ratios, default=float("inf")), 4)
    report = {"figure": "unified_ckpt_layout_bytes", "value": worst, "unit": "x", "n": len(ratios)}
    print(json.dumps({**report, "low": round(min(ratios, default=0.0), 4), "high": worst}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

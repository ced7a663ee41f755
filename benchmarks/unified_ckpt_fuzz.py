"""Ten thousand mutated headers, indexes and manifests of unified-ckpt: results or errors of ours.

Runs the code of the package's test with large counts. A table is mutated as text or as a JSON value
and its frame set right again (header length, checksum of the manifest), so that the parsers have to
find the fault. Every case must end in a result or a `CheckpointError` within seconds. Memory: the
most that Python held for one case, measured with tracemalloc, as a share of the checkpoint's bytes.

    python benchmarks/unified_ckpt_fuzz.py --count 10000
"""

import argparse
import json
import random
import sys
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import torch
from loading import load_test

from unified_ckpt import save


def main(argv: Sequence[str] | None = None) -> int:
    """Mutate and use; print what was neither a result nor an error, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=4, help="tensors, to compare memory with")
    arguments = parser.parse_args(argv)
    test = load_test("unified-ckpt", "test_damage")
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="unified-ckpt-fuzz-") as folder:
        names = [f"w{i}" for i in range(8)]
        shards = [test.whole(name, torch.rand(arguments.mib << 15)) for name in names]
        fuzz = test.Fuzz(test.make(Path(folder)))
        for _ in range(arguments.count // 2):
            problem = fuzz.once(rng)
            if problem is not None:
                bad += 1
                print(f"seed {seed}: {problem}", file=sys.stderr)
        save({"model": shards, "optimizer": shards}, checkpoint_id=Path(folder) / "large")
        large = test.Fuzz(Path(folder) / "large")
        tracemalloc.start()
        for _ in range(arguments.count - arguments.count // 2):
            problem = large.once(rng)
            if problem is not None:
                bad += 1
                print(f"seed {seed}: {problem}", file=sys.stderr)
    n = arguments.count
    for name, value, unit in (
        ("bad", bad, "cases"),
        ("refused", (fuzz.refused + large.refused) / n, "share"),
        ("peak_memory", round(large.peak_share, 4), "x of the checkpoint"),
        ("slowest", round(max(fuzz.slowest_s, large.slowest_s), 3), "s"),
    ):
        line = {"figure": f"unified_ckpt_fuzz_{name}", "value": value, "unit": unit, "n": n}
        print(json.dumps({**line, "low": value, "high": value}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many of 10,000 mutated headers the three readers of safetensors files judge differently.

The corpus and the readers are those of `integration_tests/seams/test_safetensors_headers.py`, which
runs a tenth of it: unified_ckpt's reader, weight_convert's and the safetensors library. It stops at
the first mutant of another verdict than that of a name which stands twice, or at a crash.

    python benchmarks/safetensors_headers.py [--count 10000] [--seed 0]
"""

import argparse
import json
import random
import runpy
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "integration_tests" / "seams" / "test_safetensors_headers.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    check_mutants = runpy.run_path(str(CORPUS))["check_mutants"]
    with tempfile.TemporaryDirectory() as name:
        check_mutants(Path(name) / "model.safetensors", args.seed, args.count)
    print(f"seed {args.seed}: {args.count} mutants")
    print(
        json.dumps(
            {"figure": "header_mutants_of_one_verdict", "value": args.count, "unit": "mutants"}
        )
    )


if __name__ == "__main__":
    main()

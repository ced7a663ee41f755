"""Mutants of every schedule up to 4 ranks and 8 microbatches, judged by checker and oracle.

A mutant drops an action, repeats one, or swaps two of a rank. All mutants of a schedule are judged
when there are at most `--most`, otherwise so many drawn with a fixed seed. The oracle, which shares
no code or reasoning with the checker, stands in packages/moe-pipeline/tests/test_checker.py. The
figure is the share of illegal mutants that the checker rejects; a legal one that it rejects fails
the run.

    python benchmarks/moe_pipeline_mutants.py
    python benchmarks/moe_pipeline_mutants.py --stages 3 --microbatches 3
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import ModuleType

from moe_pipeline.catalog import SCHEDULES
from moe_pipeline.checker import check

TESTS = Path(__file__).parents[1] / "packages" / "moe-pipeline" / "tests" / "test_checker.py"


def load_oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oracle", TESTS)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(TESTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line; 1 if a legal mutant was rejected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--most", type=int, default=150, help="mutants of one schedule")
    arguments = parser.parse_args(argv)
    oracle = load_oracle()
    illegal = caught = legal = wronged = 0
    for generate in SCHEDULES.values():
        for stages in range(1, arguments.stages + 1):
            for microbatches in range(1, arguments.microbatches + 1):
                mutants = list(oracle.mutants(generate(stages, microbatches)))
                if len(mutants) > arguments.most:
                    mutants = Random(0).sample(mutants, arguments.most)
                for mutant in mutants:
                    rejected = bool(check(mutant))
                    if oracle.is_legal(mutant):
                        legal, wronged = legal + 1, wronged + rejected
                    else:
                        illegal, caught = illegal + 1, caught + rejected
    share = caught / illegal
    line = {
        "figure": "illegal_mutants_rejected",
        "value": share,
        "unit": "share",
        "low": share,
        "high": share,
        "n": illegal,
        "legal": legal,
        "legal_rejected": wronged,
    }
    print(json.dumps(line))
    return 1 if wronged else 0


if __name__ == "__main__":
    sys.exit(main())

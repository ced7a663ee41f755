"""How long the steps of the example wait for their batches, with and without reading ahead.

Runs `examples/python_stdlib.toml` for a few steps with its own `data.prefetch_batches` and with 0,
in turn, and prints the median share of a step that rank 0 waits for data. The first steps, in which
files and caches are warmed, are left out.

    python benchmarks/moe_train_data_wait.py --steps 24 --rounds 2
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe_train.report.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "python_stdlib.toml"
COMMAND = str(Path(sys.executable).parent / "moe-train")
WARM_STEPS = 4


def waits(output: Path, cache: Path, steps: int, *overrides: str) -> list[float]:
    """The share of each step, from the fifth on, that rank 0 waited for its batches."""
    given = [f"train.output_dir={output}", f"data.cache_dir={cache}", f"train.max_steps={steps}"]
    quiet = ["train.validation_interval_steps=100000", "log.plots=false", "log.progress=off"]
    command = [COMMAND, "train", str(EXAMPLE), *given, *quiet, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [line for line in read_metrics(output / "metrics.jsonl") if "loss" in line]
    return [line["data_wait_fraction"] for line in lines if line["step"] > WARM_STEPS]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print both figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args(argv)
    found: dict[str, list[float]] = {"example_data_wait": [], "example_data_wait_without": []}
    with tempfile.TemporaryDirectory(prefix="moe-train-data-wait-") as folder:
        for number in range(arguments.rounds):
            for figure, override in zip(found, ((), ("data.prefetch_batches=0",)), strict=True):
                output = Path(folder) / f"{figure}-{number}"
                cache = Path(folder) / "cache"
                found[figure] += waits(output, cache, arguments.steps, *override)
    for figure, shares in found.items():
        percent = sorted(100 * share for share in shares)
        line = {"figure": figure, "value": round(statistics.median(percent), 3), "unit": "%"}
        line |= {"n": len(percent), "low": round(percent[0], 3), "high": round(percent[-1], 3)}
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())

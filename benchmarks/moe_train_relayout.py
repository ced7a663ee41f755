"""A job of four ranks that changes its layout in memory at ten random steps.

Every third layout, the first one included, has other numbers of experts on each rank.
Its end is compared with that of a job that saves and resumes in the same layouts, bit for bit, and
its losses with those of a job that never changes, in float32.

    python benchmarks/moe_train_relayout.py
    python benchmarks/moe_train_relayout.py --changes 3 --steps 6
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from loading import load_test
from moe_train_layouts import write_job

from moe_train.config import Config, load_config

LAYOUTS = ["pp=4", "dp=4", "ep=4", "pp=2 dp=2", "pp=2 ep=2", "dp=2 ep=2"]
RAGGED = ["ep=4 experts=1,3,0,4", "pp=2 ep=2 experts=6,2", "dp=2 ep=2 experts=3,5"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the three jobs; print both figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    steps = sorted(chance.sample(range(1, arguments.steps), arguments.changes))
    layouts = [chance.choice(LAYOUTS)]
    for number, _ in enumerate(steps):
        kinds = RAGGED if number % 3 == 0 else LAYOUTS
        layouts.append(chance.choice([one for one in kinds if one != layouts[-1]]))
    print(f"seed {arguments.seed}: {layouts} from steps {steps}", file=sys.stderr)
    tests = load_test("moe-train", "training/test_relayout")
    with tempfile.TemporaryDirectory(prefix="moe-train-relayout-") as folder:
        job = write_job(Path(folder), "qwen3_moe")

        def configured(name: str, layout: str, *more: str) -> Config:
            return load_config(
                job,
                [
                    *tests.overrides(layout),
                    f"train.max_steps={arguments.steps}",
                    f"train.output_dir={Path(folder) / name}",
                    "train.gradient_accumulation_steps=4",
                    *more,
                ],
            )

        changes = [f"{step}: {layout}" for step, layout in zip(steps, layouts[1:], strict=True)]
        memory = configured("memory", layouts[0], f"parallel.relayout={json.dumps(changes)}")
        found = tests.end_of(memory)
        source = None
        every = ["checkpoint.interval_steps=1", f"checkpoint.save_total_limit={arguments.steps}"]
        for number, layout in enumerate(layouts):
            expected = tests.end_of(configured(f"files-{number}", layout, *every), source)
            if number < len(steps):
                source = Path(folder) / f"files-{number}" / f"checkpoint-{steps[number]}"
        unchanged = configured("unchanged", layouts[0])
        tests.end_of(unchanged)
        apart = _apart(tests.losses_of(memory), tests.losses_of(unchanged))
    differ = sum(
        here.keys() != there.keys()
        or not all(torch.equal(t, there[name]) for name, t in here.items())
        for here, there in zip(found, expected, strict=True)
    )
    _print("moe_train_relayout_bits", differ, "ranks", arguments.changes)
    _print("moe_train_relayout_apart", apart, "x", arguments.changes)
    return 0


def _apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two losses of one step."""
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _print(figure: str, value: float, unit: str, count: int) -> None:
    report = {"figure": figure, "value": value, "unit": unit, "n": count}
    print(json.dumps({**report, "low": value, "high": value}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

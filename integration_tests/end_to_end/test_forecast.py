"""The forecast of `moe-train plan` beside real ranks; all sixteen jobs are the claim
`moe-train-forecast`.
"""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "moe_train_forecast.py"


def test_the_peak_of_every_rank_is_forecast_without_the_other_ranks() -> None:
    job = "deepseek_v3, recomputed, pp=2 x ep=2"
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--only", job], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["n"] == 4, done.stdout
    assert record["value"] <= 0.01, done.stdout

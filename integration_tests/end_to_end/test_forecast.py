"""The forecast of `moe-train plan` beside real ranks; all jobs are the claims `moe-train-forecast`
and `moe-train-forecast-by-key`.
"""

import json
import subprocess
import sys
from pathlib import Path

FAKES_ARE_NOWHERE = "error:Accessing the data pointer of FakeTensor:UserWarning"
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "moe_train_forecast.py"


def _assert_forecast(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-W", FAKES_ARE_NOWHERE, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["n"] == ranks, done.stdout
    assert record["value"] <= 0.01, done.stdout


def test_the_peak_of_every_rank_is_forecast_without_the_other_ranks() -> None:
    _assert_forecast(4, "--only", "deepseek_v3, recomputed, pp=2 x ep=2")


def test_so_it_is_where_ranks_compute_and_communicate_by_other_keys() -> None:
    jobs = ("dispatch_chunks=2", "sharding=3, ep=2, recomputed")
    _assert_forecast(2 + 4, "--keys", "--only", *jobs)

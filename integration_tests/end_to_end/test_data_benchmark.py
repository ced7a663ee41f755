import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "moe_train_data.py"


def test_the_benchmark_of_preparing_data_runs_small() -> None:
    options = ("--megabytes", "1", "--rounds", "1", "--kills", "0", "--without-peer")
    command = [sys.executable, str(BENCHMARK), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["figure"] for line in lines] == ["data_speed", "data_memory_growth"]
    assert 0.5 < lines[1]["value"] < 1.5

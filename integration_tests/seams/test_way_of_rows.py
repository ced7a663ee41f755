"""The claims of the way of rows through dispatch hold for the source of today."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "benchmarks/comm_collectives_way.py"


def test_rows_of_a_dispatch_are_handed_on_as_often_as_claimed() -> None:
    claims = tomllib.loads((ROOT / "benchmarks" / "claims.toml").read_text("utf-8"))["claim"]
    limits = {
        claim["figure"]: int(claim["limit"].removeprefix("<= "))
        for claim in claims
        if claim["command"] == f"python {SCRIPT}"
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    values = {each["figure"]: each["value"] for each in found}
    assert values.keys() == limits.keys() and len(limits) == 3
    assert all(values[name] <= limits[name] for name in limits), values

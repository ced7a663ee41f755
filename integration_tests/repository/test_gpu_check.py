import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from claims.ledger import read_ledger
from workspace import ROOT, gpu_test_files

SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so_names_all_that_was_not_run_and_fails() -> None:
    done = run()
    assert done.returncode == 1 and not done.stdout
    assert "sees no CUDA device" in done.stderr or "is not a CUDA build" in done.stderr
    named = {line.strip() for line in done.stderr.splitlines() if line.startswith("  ")}
    files = {file.relative_to(ROOT).as_posix() for file in gpu_test_files(ROOT)}
    claims = {f"{c.package}: {c.id}" for c in read_ledger(ROOT) if c.gpu}
    assert len(files) > 20 and len(claims) > 5
    assert files | claims <= named


def test_an_unknown_argument_is_refused() -> None:
    done = run("--instaled")
    assert done.returncode == 2
    assert "unknown argument --instaled" in done.stderr


def test_a_python_without_torch_is_told_what_to_set(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    done = run(PYTHON=str(tmp_path / "v" / "bin" / "python"))
    assert done.returncode != 0
    assert "torch is not installed" in done.stderr and "set PYTHON" in done.stderr


# Stands in for python: notes what pytest is asked to run, and leaves the report that it would.
STAND_IN = """#!{python}
import json, os, subprocess, sys
if sys.argv[1:3] != ["-m", "pytest"]:
    if sys.argv[1].endswith("summary.py"):
        sys.exit(subprocess.call([{python!r}, *sys.argv[1:]]))
    sys.exit(0)
files = [word for word in sys.argv if word.endswith(".py")]
with open({log!r}, "a") as log:
    log.write(json.dumps([os.getpid(), files]) + "\\n")
gone = "gpu-alloc" in files[0]
report = dict(passed=0 if gone else 1, skipped=1, failures=[], exit_status=5 if gone else 0,
              not_run=["test_x.py::test_y: two cards are needed"])
open(os.environ["TEST_REPORT"], "w").write(json.dumps(report))
sys.exit(5 if gone else 0)
"""


def test_each_package_has_a_process_of_its_own_and_what_was_not_run_is_named(
    tmp_path: Path,
) -> None:
    stand_in, log = tmp_path / "python", tmp_path / "log"
    stand_in.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    stand_in.chmod(0o755)
    done = run(PYTHON=str(stand_in))
    assert done.returncode == 0, done.stdout + done.stderr
    started = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({pid for pid, _ in started}) == len(started) > 4
    packages = [{"/".join(file.split("/")[:2]) for file in files} for _, files in started]
    assert all(len(names) == 1 for names in packages[:-1])
    assert "test_x.py::test_y: two cards are needed" in done.stdout


@pytest.mark.gpu(needs="driver")
def test_a_gpu_is_seen_and_computes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_gpu.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

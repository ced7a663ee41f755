import os
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT

SCRIPT = ROOT / "scripts" / "gpu_check.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_fails() -> None:
    done = run()
    assert done.returncode != 0
    assert "sees no CUDA device" in done.stderr or "is not a CUDA build" in done.stderr


def test_an_unknown_argument_is_refused() -> None:
    done = run("--instaled")
    assert done.returncode == 2
    assert "unknown argument --instaled" in done.stderr


def test_a_python_without_torch_is_told_what_to_set(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "v"], check=True)
    done = run(PYTHON=str(tmp_path / "v" / "bin" / "python"))
    assert done.returncode != 0
    assert "torch is not installed" in done.stderr and "set PYTHON" in done.stderr


@pytest.mark.gpu
def test_a_gpu_is_seen_and_computes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_gpu.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

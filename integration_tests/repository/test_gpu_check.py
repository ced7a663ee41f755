import ast
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


FORKS = {"run_ranks", "collect_ranks", "check_machine"}


def forking(source: str) -> dict[str, bool]:
    """The tests of a file that are marked gpu: whether each starts ranks, itself or by a helper."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    whole = any("mark.gpu" in ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign))

    def forks(name: str, seen: frozenset[str]) -> bool:
        used = {n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)}
        further = used & functions.keys() - seen
        return bool(used & FORKS) or any(forks(each, seen | {each}) for each in further)

    def is_marked(node: ast.FunctionDef) -> bool:
        return whole or any("mark.gpu" in ast.unparse(each) for each in node.decorator_list)

    tests = {n: f for n, f in functions.items() if n.startswith("test_") and is_marked(f)}
    return {name: forks(name, frozenset({name})) for name in tests}


def test_no_process_of_gpu_tests_uses_cuda_and_forks_ranks_that_use_it() -> None:
    """CUDA cannot be used in a process whose parent used it; each package has one process."""
    kinds: dict[str, dict[bool, list[str]]] = {}
    for file in gpu_test_files(ROOT):
        package = file.relative_to(ROOT).parts[1]
        for test, forks in forking(file.read_text()).items():
            kinds.setdefault(package, {}).setdefault(forks, []).append(f"{file.name}::{test}")
    assert len(kinds) >= 5
    assert True in kinds["comm-collectives"] and False in kinds["moe-pipeline"]
    assert {package: found for package, found in kinds.items() if len(found) > 1} == {}


def test_a_test_that_forks_by_a_helper_is_known() -> None:
    source = """
@pytest.mark.gpu
def test_a(): helper(1)
def helper(x): return inner(x)
def inner(x): run_ranks(fn, 2)
@pytest.mark.gpu(needs="x")
def test_b(): torch.ones(1, device="cuda")
def test_c(): run_ranks(fn, 2)
"""
    assert forking(source) == {"test_a": True, "test_b": False}


@pytest.mark.gpu(needs="driver")
def test_a_gpu_is_seen_and_computes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_gpu.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

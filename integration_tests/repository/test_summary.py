import json
import subprocess
import sys
from pathlib import Path

import pytest

from summary import Report, closing_line, read_report, table
from workspace import ROOT

GOOD = {"passed": 3, "skipped": 1, "failures": [], "gpu_deselected": 2, "exit_status": 0}


def write(folder: Path, session: str, **fields: object) -> None:
    (folder / f"{session}.json").write_text(json.dumps(GOOD | fields))


def run(folder: Path, *sessions: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/summary.py"), "--reports", str(folder)]
    return subprocess.run([*command, *sessions], capture_output=True, text=True, check=False)


def test_green_sessions_add_up_to_the_closing_line(tmp_path: Path) -> None:
    write(tmp_path, "lint")
    write(tmp_path, "mesh-spmd", passed=4)
    done = run(tmp_path, "--closing-line", "lint", "mesh-spmd")
    assert (done.returncode, done.stdout) == (0, "7 passed, 0 failed\n")


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"failures": ["t.py::test_x (failed)"]}, "t.py::test_x (failed)"),
        ({"failed_checks": ["mypy"]}, "mypy"),
        ({"passed": 0}, "no test passed"),
        ({"exit_status": 3}, "pytest ended with exit status 3"),
    ],
)
def test_a_session_that_is_not_green_fails(
    tmp_path: Path, fields: dict[str, object], failure: str
) -> None:
    write(tmp_path, "lint")
    write(tmp_path, "seams", **fields)
    done = run(tmp_path, "lint", "seams")
    assert done.returncode == 1
    assert f"- seams: {failure}" in done.stdout
    assert done.stdout.rstrip().endswith("1 failed")


def test_a_session_without_a_report_fails(tmp_path: Path) -> None:
    write(tmp_path, "lint")
    done = run(tmp_path, "lint", "seams")
    assert done.returncode == 1
    assert "seams: ended before its tests did" in done.stdout


def test_a_half_written_report_fails(tmp_path: Path) -> None:
    (tmp_path / "lint.json").write_text('{"passed": 1')
    assert read_report(tmp_path, "lint").failures


def test_no_report_at_all_is_no_success(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 1


def test_the_table_counts_gpu_tests_that_did_not_run() -> None:
    reports = [Report(session="gpu-alloc", passed=5, gpu_deselected=2, seconds=1.4)]
    assert closing_line(reports) == "5 passed, 0 failed"
    assert table(reports, markdown=True).splitlines()[2].split("|")[1:7] == [
        " gpu-alloc ",
        "      5 ",
        "      0 ",
        "       0 ",
        "        2 ",
        "       1 ",
    ]


def test_a_test_run_leaves_a_report_of_what_passed_failed_and_was_deselected(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_broken(no_such_fixture): pass\n"
        "@pytest.mark.gpu\ndef test_gpu(): pass\n"
    )
    report = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={"TEST_REPORT": str(report)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 gpu tests deselected" in done.stdout
    fields = json.loads(report.read_text())
    assert fields["passed"] == 1
    assert fields["gpu_deselected"] == 1
    assert fields["exit_status"] == 1
    assert fields["failures"] == [
        "test_it.py::test_bad (failed)",
        "test_it.py::test_broken (error)",
    ]

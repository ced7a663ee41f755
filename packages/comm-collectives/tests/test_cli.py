"""The command line, as a process: what it prints and how it ends."""

import json
import subprocess
import sys

import pytest

from comm_collectives.cli import main


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from comm_collectives.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120
    )


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom comm_collectives.cli import main\n"
        "try:\n    main(['check', '--help'])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--world-size" in done.stdout


def test_check_finds_this_machine_right() -> None:
    done = _run("check", "--world-size", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["num_ranks"] == 2
    assert not report["blind"]
    assert len(report["cells"]) > 300
    assert all(cell["verdict"] == cell["expected"] for cell in report["cells"])


def test_check_that_runs_out_of_time_names_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--timeout-s", "0.01"]) == 1
    assert "ranks 0, 1 did not finish within 0.01 s" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--world-size", "0"], ["--timeout-s", "-1"]])
def test_misuse_ends_with_status_two(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *args]) == 2
    assert "must be positive" in capsys.readouterr().err

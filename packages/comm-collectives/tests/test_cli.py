"""The command line, as a process: what it prints and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comm_collectives.checking.misuse.table import MISUSES
from comm_collectives.cli import main
from ranktest import unread_output

SIZES = ["--nodes=10000", "--gpus-per-node=8", "--experts=160000", "--topk=8", "--hidden=7168"]


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from comm_collectives.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=900
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


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "comm_collectives", "plan", *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "chosen: hierarchical float8_e4m3" in done.stdout


def test_check_finds_this_machine_right() -> None:
    """Every cell and every mistake on two ranks; on four they are run where they are made."""
    done = _run("check", "--world-size", "2", "--wire", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["num_ranks"] == 2
    assert report["problems"] == report["missed_canaries"] == []
    outcomes = report["outcomes"]
    bad = [outcome for outcome in outcomes if outcome["verdict"] != outcome["expected"]]
    assert bad == []
    mistakes = sum("mistake" in outcome for outcome in outcomes)
    assert mistakes == 2 * (len(MISUSES) + 1)  # here and over the wire
    assert len(outcomes) - mistakes > 4000 + 600


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a device")
def test_a_machine_without_devices_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cuda"]) == 2
    assert "--device: torch sees no CUDA device; leave out --device" in capsys.readouterr().err


def test_every_dtype_without_raw_ends_with_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--all"]) == 2
    assert "--all: every dtype of --raw; give both" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "1"])
def test_too_small_a_world_ends_with_status_two(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--world-size", size]) == 2
    assert f"--world-size: world size {size} must be at least 2" in capsys.readouterr().err


def test_fuzz_says_how_schedules_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--schedules", "2", "--seed", "11"]) == 0
    assert "2 of 2 schedules from seed 11" in capsys.readouterr().out
    assert main(["fuzz", "--schedules", "0"]) == 2
    assert "--schedules: num_schedules=0" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with unread_output():
        assert main(["plan", *SIZES]) == 1
    assert capsys.readouterr().err == ""


def test_a_pipe_of_the_program_itself_that_breaks_is_not_taken_for_its_output(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise BrokenPipeError(32, 'a socket')")
    done = _run("run", str(script))
    assert done.returncode == 1 and "BrokenPipeError: [Errno 32] a socket" in done.stderr

"""A rank as a process: each is a fork of this one, which is its launcher then."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from moe_train.rank import rank_main
from moe_train.rank.rank import (
    RankError,
    RankJob,
    RankJobError,
    leave,
    rank_file,
    run_rank,
    watch_stop_signals,
)
from moe_train.rank.rank_main import run_launched
from package_facts import check_import_is_cheap
from ranktest import Outcome, collect_ranks, run_ranks

JOB = """
import signal


def run(argv, context):
    what, folder = argv
    for context.step in range(1, 4):
        if what == "fail" and context.step == 3:
            raise KeyError("expert 7")
        if what == "stop":
            signal.raise_signal(signal.SIGTERM)
    with open(folder + "/ran", "w") as stream:
        stream.write(f"{context.step} {context.stop_requested}")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a job module that forked ranks can import; no other test has one of its name."""
    name = f"job_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "3")
    return name


def as_rank(fn: Callable[[], object]) -> object:
    return run_ranks(lambda *_: fn(), 1, init=False)[0]


def launched(folder: Path, module: str, what: str, launcher_pid: int) -> Outcome:
    """How a rank of this launch ended."""
    job = RankJob(module=module, argv=[what, str(folder)], launcher_pid=launcher_pid)
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    return collect_ranks(lambda *_: run_launched(folder), 1, init=False)[0]


def failure(module: str, argv: list[str]) -> RankError | None:
    try:
        run_rank(module, argv, watch_stop_signals())
    except RankJobError as error:
        assert str(error) == f"rank {error.error.rank}, step {error.error.step}: " + (
            error.error.summary
        )
        assert error.__cause__ is not None
        return error.error
    return None


def test_a_job_gets_its_arguments_and_the_flag(module: str, tmp_path: Path) -> None:
    assert as_rank(lambda: failure(module, ["stop", str(tmp_path)])) is None
    assert (tmp_path / "ran").read_text() == "3 True"


def test_what_a_job_raises_is_told_with_rank_step_time_and_traceback(
    module: str, tmp_path: Path
) -> None:
    before = time.monotonic()
    error = as_rank(lambda: failure(module, ["fail", str(tmp_path)]))
    assert isinstance(error, RankError)
    assert (error.rank, error.step, error.summary) == (3, 3, "KeyError: 'expert 7'")
    assert before < error.monotonic_s < time.monotonic()
    assert error.text.startswith("Traceback") and f"{module}.py" in error.text
    assert not (tmp_path / "ran").exists()


def test_a_module_that_cannot_be_imported_fails_at_step_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    error = as_rank(lambda: failure("no_such_job", []))
    assert isinstance(error, RankError)
    assert (error.rank, error.step) == (0, 0)
    assert error.summary == "ModuleNotFoundError: No module named 'no_such_job'"


def test_a_rank_that_ends_well_says_that_it_was_ready_and_that_it_is_done(
    module: str, tmp_path: Path
) -> None:
    ended = launched(tmp_path, module, "", os.getpid())
    assert (ended.value, ended.error) == (0, None)
    assert (tmp_path / "ran").read_text() == "3 False"
    assert int(rank_file(tmp_path, 3, "pid").read_text()) != os.getpid()
    assert rank_file(tmp_path, 3, "done").exists()
    assert not rank_file(tmp_path, 3, "error.json").exists()


def test_a_rank_that_fails_leaves_its_error_and_is_not_done(module: str, tmp_path: Path) -> None:
    assert launched(tmp_path, module, "fail", os.getpid()).value == 1
    error = RankError(**json.loads(rank_file(tmp_path, 3, "error.json").read_bytes()))
    assert (error.rank, error.step, error.summary) == (3, 3, "KeyError: 'expert 7'")
    assert rank_file(tmp_path, 3, "pid").exists()
    assert not rank_file(tmp_path, 3, "done").exists()


def test_a_rank_whose_launcher_is_gone_ends_without_running_its_job(
    module: str, tmp_path: Path
) -> None:
    ended = launched(tmp_path, module, "", launcher_pid=os.getppid())
    assert (ended.value, ended.error_type, ended.exitcode) == (None, "Died", 1)
    assert not (tmp_path / "ran").exists()
    assert not rank_file(tmp_path, 3, "pid").exists()


def test_a_failed_rank_leaves_at_once_and_without_cleaning_up(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        sys.stdout.write("the last words")
        try:
            leave(5)
        finally:
            print("never")

    (ended,) = collect_ranks(lambda *_: fail(), 1, init=False)
    assert (ended.error_type, ended.exitcode) == ("Died", 5)
    assert capfd.readouterr().out == "the last words"
    with pytest.raises(SystemExit) as normal:
        leave(0)
    assert normal.value.code == 0


def test_a_rank_starts_without_torch() -> None:
    check_import_is_cheap(rank_main, "torch", "numpy")

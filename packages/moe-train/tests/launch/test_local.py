"""Real rank processes. Most tests launch from this process; some need a launcher of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_train.errors import RankFailedError, StoppedUnsavedError
from moe_train.launch.local import run_local

# The job module of these tests: a rank steps on until told otherwise, and leaves files that show
# how far it is. With "dist" in its name it meets the other ranks in each step.
JOB = """
import os, signal, time
from datetime import timedelta
from pathlib import Path


def run(argv, context):
    what, folder, victim, max_steps = argv[0], Path(argv[1]), int(argv[2]), int(argv[3])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if what == "early" and rank == victim:
        raise OSError("no such corpus")
    if "dist" in what:
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        assert dist.get_world_size() == world_size
    if what == "own clock":
        (folder / "age").write_text(str(context.age_s))
        context.out_of_time = rank == victim
        return
    for step in range(1, max_steps + 1):
        context.step = step
        if "dist" in what:
            dist.barrier()
        (folder / f"rank-{rank}.new").write_text(f"{os.getpid()} {step}")
        (folder / f"rank-{rank}.new").replace(folder / f"rank-{rank}")
        if context.stop_requested:
            time.sleep(600 if what == "stuck save" else 1.0)
            (folder / f"saved-{rank}").write_text(f"{step} {next(iter(context.signals.seen)).name}")
            context.is_finished = what == "last step"
            break
        time.sleep(0.02)
        if step == 5 and rank == victim:
            if "raise" in what:
                raise RuntimeError("expert 3 is lost\\nsecond line")
            if "exit" in what:
                os._exit(7)
            if "kill" in what:
                os.kill(os.getpid(), signal.SIGKILL)
    if "dist" in what:
        dist.destroy_process_group()
"""

LAUNCHER = """
import sys
from moe_train.launch.local import run_local

if __name__ == "__main__":
    stopped = run_local(2, "a_test_job", sys.argv[1:])
    sys.exit(0 if stopped is None else 128 + stopped)
"""

FOREVER = 1_000_000


class Ranks:
    """What the ranks of one launch leave in a folder, and how to launch them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def argv(self, what: str, victim: int = 1, max_steps: int = FOREVER) -> list[str]:
        return [what, str(self.folder), str(victim), str(max_steps)]

    def progress(self, rank: int) -> tuple[int, int]:
        """Process number and step of a rank, zeros before its first step."""
        path = self.folder / f"rank-{rank}"
        pid, step = path.read_text().split() if path.exists() else (0, 0)
        return int(pid), int(step)

    def wait_for_step(self, step: int, world_size: int = 2) -> None:
        wait_until(lambda: all(self.progress(rank)[1] >= step for rank in range(world_size)))

    def pids(self) -> list[int]:
        """Rank processes that run: their command line holds the launcher's folder."""
        return processes_naming(str(self.folder / "tmp" / "moe-train-"))

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("saved-*"))

    def check_nothing_left(self) -> None:
        assert processes_naming(str(self.folder)) == []
        assert list((self.folder / "tmp").iterdir()) == []


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "a_test_job.py").write_text(JOB)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield Ranks(tmp_path)


def processes_naming(text: str) -> list[int]:
    """Other running processes whose environment or command line holds `text`, found in /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                held = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text.encode() in held and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


def meanwhile(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def failure_of(ranks: Ranks, what: str, **options: int) -> tuple[str, float]:
    """The message of a job that fails, and the seconds it ran."""
    world_size = options.pop("world_size", 2)
    started = time.monotonic()
    with pytest.raises(RankFailedError) as raised:
        run_local(world_size, "a_test_job", ranks.argv(what, **options), failure_grace_s=1.0)
    ranks.check_nothing_left()
    return str(raised.value), time.monotonic() - started


def test_ranks_meet_and_run_to_the_end(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_local(2, "a_test_job", ranks.argv("dist", max_steps=5)) is None
    assert [ranks.progress(rank)[1] for rank in range(2)] == [5, 5]
    assert capfd.readouterr().err == ""
    ranks.check_nothing_left()


def test_raising_rank_is_the_cause_and_its_peers_errors_follow(ranks: Ranks) -> None:
    message, _ = failure_of(ranks, "dist raise")
    assert message.startswith("rank 1, step 5: Traceback"), message
    assert "RuntimeError: expert 3 is lost" in message


def test_killed_rank_is_the_cause_and_its_peers_errors_follow(ranks: Ranks) -> None:
    message, _ = failure_of(ranks, "dist kill", victim=2, world_size=3)
    first = message.splitlines()[0]
    assert first.startswith("rank 2") and "killed by SIGKILL" in first, message


def test_rank_that_fails_at_its_start_ends_the_job(ranks: Ranks) -> None:
    message, _ = failure_of(ranks, "early")
    assert message.startswith("rank 1, step 0: Traceback"), message
    assert "OSError: no such corpus" in message


def test_rank_that_exits_silently_is_named_with_its_code(ranks: Ranks) -> None:
    message, _ = failure_of(ranks, "exit")
    assert message.startswith("rank 1: ended with exit code 7 and no traceback"), message


def test_job_module_that_does_not_exist_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="No module named 'no_such_job'"):
        run_local(1, "no_such_job", [], failure_grace_s=1.0)


def test_hanging_survivor_is_killed_within_the_grace(ranks: Ranks) -> None:
    def kill_first() -> None:
        ranks.wait_for_step(3)
        os.kill(ranks.progress(1)[0], signal.SIGSTOP)  # it will not answer SIGTERM
        os.kill(ranks.progress(0)[0], signal.SIGKILL)

    thread = meanwhile(kill_first)
    message, elapsed_s = failure_of(ranks, "")
    thread.join()
    assert message.startswith("rank 0: killed by SIGKILL"), message
    assert "then ranks 1 killed: ended after another rank had failed" in message
    assert elapsed_s < 20, message


def test_a_rank_that_ends_for_the_sake_of_the_jobs_own_limit_is_told_of(ranks: Ranks) -> None:
    asked_s = time.monotonic() - 100.0  # before a corpus was prepared, say
    stopped = run_local(2, "a_test_job", ranks.argv("own clock"), started_s=asked_s)
    assert stopped == signal.SIGALRM
    assert float((ranks.folder / "age").read_text()) > 100


def test_stop_request_lets_ranks_save(ranks: Ranks) -> None:
    def stop() -> None:
        ranks.wait_for_step(3)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = meanwhile(stop)
    assert run_local(2, "a_test_job", ranks.argv("")) == signal.SIGTERM
    thread.join()
    assert ranks.saved() == ["saved-0", "saved-1"]
    assert signal.getsignal(signal.SIGTERM) is before
    ranks.check_nothing_left()


def test_a_stop_request_in_the_last_step_leaves_a_finished_job(ranks: Ranks) -> None:
    def stop() -> None:
        ranks.wait_for_step(3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = meanwhile(stop)
    assert run_local(2, "a_test_job", ranks.argv("last step")) is None
    thread.join()
    assert ranks.saved() == ["saved-0", "saved-1"]


def test_stop_request_while_ranks_start_is_not_lost(ranks: Ranks) -> None:
    def stop() -> None:
        wait_until(lambda: bool(ranks.pids()))
        os.kill(os.getpid(), signal.SIGINT)

    thread = meanwhile(stop)
    assert run_local(2, "a_test_job", ranks.argv("")) == signal.SIGINT
    thread.join()
    assert ranks.saved() == ["saved-0", "saved-1"]


def test_second_interrupt_kills_at_once(ranks: Ranks) -> None:
    asked_s = []

    def stop_twice() -> None:
        ranks.wait_for_step(3)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same Ctrl-C, delivered twice
        time.sleep(1.0)
        assert len(ranks.pids()) == 2
        asked_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = meanwhile(stop_twice)
    with pytest.raises(StoppedUnsavedError, match="second SIGINT") as raised:
        run_local(2, "a_test_job", ranks.argv("stuck save"))
    thread.join()
    assert raised.value.signal_number == signal.SIGINT
    assert time.monotonic() - asked_s[0] < 5
    assert ranks.saved() == []
    ranks.check_nothing_left()


def test_save_that_never_ends_is_killed_after_the_grace(ranks: Ranks) -> None:
    def stop() -> None:
        ranks.wait_for_step(3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = meanwhile(stop)
    with pytest.raises(RankFailedError, match="ranks 0, 1 killed: not saved within 1 s"):
        run_local(2, "a_test_job", ranks.argv("stuck save"), stop_grace_s=1.0)
    thread.join()
    ranks.check_nothing_left()


def test_current_folder_does_not_shadow_installed_modules(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "json.py").write_text("raise ImportError('the wrong json')\n")
    monkeypatch.chdir(shadow)
    assert run_local(1, "a_test_job", ranks.argv("", max_steps=2)) is None


def start_launcher(ranks: Ranks) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, str(ranks.folder / "launcher.py"), *ranks.argv("")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks.wait_for_step(3)
    return process


def test_interrupt_of_a_whole_process_group_saves(ranks: Ranks) -> None:
    process = start_launcher(ranks)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert ranks.saved() == ["saved-0", "saved-1"], errors
    assert errors.count("finishing the step") == 1
    ranks.check_nothing_left()


def test_ranks_die_with_a_killed_launcher(ranks: Ranks) -> None:
    process = start_launcher(ranks)
    process.kill()
    process.communicate()
    wait_until(lambda: processes_naming(str(ranks.folder)) == [], timeout_s=10)

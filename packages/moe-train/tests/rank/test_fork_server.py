"""Launchers are processes of their own here: one that runs tests has too many threads to fork."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_train.rank.fork_server import ForkServer

LAUNCHER = """
import json, os, signal, sys
from pathlib import Path

from moe_train.errors import RankFailedError
from moe_train.rank import ForkServer

folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
ForkServer.begin("a_job")
from moe_train.launch import run_local
if "server" in sys.argv:
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        os.kill(int(children.read()), signal.SIGKILL)
os.environ["SET_AFTERWARDS"] = "yes"
for what, size in jobs:
    (folder / what).mkdir()
    try:
        stopped = run_local(size, "a_job", [str(folder / what), what])
    except RankFailedError as error:
        (folder / what / "failed").write_text(str(error))
        continue
    if stopped is not None:
        sys.exit(128 + stopped)
"""
JOB = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

IMPORTED_IN = os.getpid()


def run(argv, context):
    folder, what = Path(argv[0]), argv[1]
    torch.set_num_threads(2)
    values = torch.arange(1 << 18, dtype=torch.float64)
    found = float((values * 2).sum())
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    told = {
        "pid": os.getpid(),
        "is_forked": IMPORTED_IN != os.getpid(),
        "parent": os.getppid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "variable": os.environ.get("SET_AFTERWARDS"),
        "threads": torch.get_num_threads(),
        "sum": found,
        "total": total.item(),
    }
    (folder / f"new-{rank}").write_text(json.dumps(told))
    (folder / f"new-{rank}").replace(folder / f"rank-{rank}")
    while not what.startswith("end") and not context.stop_requested:
        context.step += 1
        if what == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise" and rank == 1:
            raise OSError("the disk is lost")
        time.sleep(0.01)
    if what not in ("kill", "raise"):
        sys.stdout.write(f"rank {rank} ends\\n")
    dist.destroy_process_group()
"""


END, END_OF_3, KILL, RAISE, WAIT = (
    ("end", 1),
    ("end of 3", 3),
    ("kill", 2),
    ("raise", 2),
    ("wait", 2),
)


class Launcher:
    """A process that launches one job after the other, each in a folder that has its name."""

    def __init__(self, folder: Path, *jobs: tuple[str, int], kill: str = "") -> None:
        self.folder = folder
        (folder / "a_job.py").write_text(JOB)
        (folder / "launcher.py").write_text(LAUNCHER)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "launcher.py"), str(folder), json.dumps(jobs), kill],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def told(self, what: str, size: int) -> list[dict[str, Any]]:
        """What the ranks of a job have said, when all have."""
        files = [self.folder / what / f"rank-{rank}" for rank in range(size)]
        wait_until(lambda: all(file.exists() for file in files))
        return [json.loads(file.read_text()) for file in files]

    def failure(self, what: str) -> str:
        return (self.folder / what / "failed").read_text()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.02)


def running(session: int) -> list[int]:
    """Processes of a launcher's session and of those that its ranks have made."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def expected(rank: int, size: int, launcher_pid: int, *, is_forked: bool) -> dict[str, Any]:
    return {
        "is_forked": is_forked,
        "parent": launcher_pid,
        "name": f"rank {rank}",
        "variable": "yes",
        "threads": 2,
        "sum": (1 << 18) * ((1 << 18) - 1.0),
        "total": size * (size + 1) // 2,
    }


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="beside a GPU nothing is forked")
def test_forked_ranks_of_every_launch_are_the_launchers_and_end_as_others_do(
    tmp_path: Path,
) -> None:
    launcher = Launcher(tmp_path, END, END_OF_3, KILL, RAISE, WAIT)
    launcher.told(*WAIT)
    os.killpg(launcher.pid, signal.SIGINT)
    out, errors = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 128 + signal.SIGINT, errors
    assert errors.count("finishing the step") == 1 and "Traceback" not in errors
    ended = ["rank 0 ends"] * 3 + ["rank 1 ends"] * 2 + ["rank 2 ends"]
    assert sorted(out.splitlines()) == ended
    for what, size in (END, END_OF_3, KILL, RAISE, WAIT):
        found = launcher.told(what, size)
        assert len({each.pop("pid") for each in found}) == size
        assert found == [expected(r, size, launcher.pid, is_forked=True) for r in range(size)]
    assert launcher.failure("kill").startswith("rank 1: killed by SIGKILL;")
    assert launcher.failure("raise").startswith("rank 1, step 1: Traceback")
    assert running(launcher.pid) == []


def test_without_the_server_ranks_are_programs_of_their_own(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, END, kill="server")
    out, errors = launcher.process.communicate(timeout=120)
    assert (launcher.process.returncode, out, errors) == (0, "rank 0 ends\n", "")
    (found,) = launcher.told(*END)
    del found["pid"]
    assert found == expected(0, 1, launcher.pid, is_forked=False)


def test_nothing_outlives_a_killed_launcher_that_forks(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, WAIT)
    ranks = [each["pid"] for each in launcher.told(*WAIT)]
    launcher.process.kill()
    launcher.process.communicate(timeout=60)  # no process holds its pipes
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert running(launcher.pid) == []


def test_a_process_with_several_threads_prepares_nothing(tmp_path: Path) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        ForkServer.begin("no_such_module")
        assert ForkServer.fork_ranks(tmp_path, [{}]) == []
    finally:
        over.set()
        thread.join()

"""One rank of a job, as a process: `python -m moe_train.launch.rank_main RUN_DIR`.

The launcher writes `RUN_DIR/job.json` with the module to run; the rank writes `rank-<n>.pid` once
it is ready for signals, then `rank-<n>.done`, or `rank-<n>.error.json` if its job raises. The
module is a seam: it defines `run(argv: list[str], stop: StopFlag) -> None` and
`current_step() -> int`.

Invariant: a rank never outlives its launcher, and never ends with an error without having said so.

    run_rank("moe_train.jobs.rank_job", ["config.toml", ""], stop)  # under torchrun, no RUN_DIR
"""

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from moe_train.data import write_atomic
from moe_train.errors import MoeTrainError
from moe_train.launch.signals import StopFlag

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What a failing rank leaves for the launcher.

    Attributes:
        rank: its number in the job.
        step: finished steps when it failed.
        monotonic_s: when, on the machine's monotonic clock, which all processes share.
        text: the traceback.
        summary: type and message of the exception.
    """

    rank: int
    step: int
    monotonic_s: float
    text: str
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a launch runs, and who launched it."""

    module: str
    argv: list[str]
    launcher_pid: int


def pid_file(run_dir: Path, rank: int) -> Path:
    """The file in which a rank says that it is ready for signals."""
    return run_dir / f"rank-{rank}.pid"


def done_file(run_dir: Path, rank: int) -> Path:
    """The file in which a rank says that its job ran to its end."""
    return run_dir / f"rank-{rank}.done"


def error_file(run_dir: Path, rank: int) -> Path:
    """The file in which a rank says why it failed."""
    return run_dir / f"rank-{rank}.error.json"


class RankJobError(MoeTrainError):
    """A rank's job raised; `error` says where and why."""

    def __init__(self, error: RankError) -> None:
        super().__init__(f"rank {error.rank}, step {error.step}: {error.summary}")
        self.error = error


def run_rank(module: str, argv: Sequence[str], stop: StopFlag) -> None:
    """Import `module` and call its `run`.

    Raises:
        RankJobError: whatever exception the job raised, with rank and step.
    """
    step = 0
    try:
        job = import_module(module)
        try:
            job.run(list(argv), stop)
        finally:
            step = job.current_step()
    # Whatever a job raises must reach the person who started it, with rank and step.
    except Exception as error:
        raised = RankError(
            rank=_rank(),
            step=step,
            monotonic_s=time.monotonic(),
            text=traceback.format_exc(),
            summary=f"{type(error).__name__}: {error}",
        )
        raise RankJobError(raised) from error


def main(run_dir: Path) -> int:
    """Run this rank of the launch described in `run_dir`; returns the exit code."""
    stop = StopFlag()
    stop.install()
    job = RankJob(**json.loads((run_dir / "job.json").read_bytes()))
    _die_with(job.launcher_pid)
    write_atomic(pid_file(run_dir, _rank()), str(os.getpid()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_rank(job.module, job.argv, stop)
    except RankJobError as failure:
        write_atomic(error_file(run_dir, _rank()), json.dumps(asdict(failure.error)))
        return 1
    write_atomic(done_file(run_dir, _rank()), "")
    return 0


def leave(exit_code: int) -> None:
    """End this process; after a failure at once, for its threads may wait for lost peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)
    sys.exit(0)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _die_with(launcher_pid: int) -> None:
    """Have the system kill this process when the launcher ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)  # it ended before the request was in force


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))

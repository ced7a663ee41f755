"""One rank that the launcher of this machine has started, be it a program of its own or a fork.

Invariant: a rank ends with its launcher, and writes down its error before it ends with one.

    leave(run_launched(run_dir))
"""

import ctypes
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from moe_train.cache import write_atomic
from moe_train.rank.rank import (
    RankJob,
    RankJobError,
    rank_file,
    rank_number,
    run_rank,
    watch_stop_signals,
)

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def run_launched(run_dir: Path) -> int:
    """Run this rank of the launch described in `run_dir`; returns the exit code.

    Where the system can show it (Linux), the process is called `rank 3` then.
    """
    context, rank = watch_stop_signals(), rank_number()
    job = RankJob(**json.loads((run_dir / "job.json").read_bytes()))
    context.started_s = job.started_s
    _die_with(job.launcher_pid, f"rank {rank}")
    write_atomic(rank_file(run_dir, rank, "pid"), str(os.getpid()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_rank(job.module, job.argv, context)
    except RankJobError as failure:
        write_atomic(rank_file(run_dir, rank, "error.json"), json.dumps(asdict(failure.error)))
        return 1
    write_atomic(rank_file(run_dir, rank, "done"), context.outcome)
    return 0


def _die_with(launcher_pid: int, name: str) -> None:
    """Have the system kill this process when the launcher ends, however it ends (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode())
    if os.getppid() != launcher_pid:
        os._exit(1)  # it ended before the request was in force

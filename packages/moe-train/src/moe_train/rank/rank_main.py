"""The program of one rank: `python -m moe_train.rank.rank_main RUN_DIR`.

Invariant: a rank ends with its launcher, and writes down its error before it ends with one.
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
    leave,
    rank_file,
    rank_number,
    run_rank,
    watch_stop_signals,
)

_PR_SET_PDEATHSIG = 1


def main(run_dir: Path) -> int:
    """Run this rank of the launch described in `run_dir`; returns the exit code."""
    context, rank = watch_stop_signals(), rank_number()
    job = RankJob(**json.loads((run_dir / "job.json").read_bytes()))
    _die_with(job.launcher_pid)
    write_atomic(rank_file(run_dir, rank, "pid"), str(os.getpid()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_rank(job.module, job.argv, context)
    except RankJobError as failure:
        write_atomic(rank_file(run_dir, rank, "error.json"), json.dumps(asdict(failure.error)))
        return 1
    write_atomic(rank_file(run_dir, rank, "done"), "")
    return 0


def _die_with(launcher_pid: int) -> None:
    """Have the system kill this process when the launcher ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)  # it ended before the request was in force


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))

"""Start the ranks of a job on this machine, watch them, and end them together.

Torch elastic starts the processes and gathers their exit codes, in a thread of its own; elastic
leaves signals alone there, so the main thread decides what a signal means and how long to wait.

Invariants: one failing rank ends the job within seconds, and the failure that came first is the one
reported; a stop is passed on to each rank once, as soon as that rank can take it; when `run_local`
returns or raises, no rank is left.

    stopped_by = run_local(4, "moe_train.jobs.rank_job", ["config.toml", ""])
    # None: ran to the end; signal.SIGINT: saved and stopped on Ctrl-C
"""

import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from types import FrameType
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from moe_train.cache import write_atomic
from moe_train.errors import RankFailedError, StoppedUnsavedError, check_type
from moe_train.rank import RankError, RankJob, rank_file

STOP_GRACE_S = 300.0
"""How long ranks may take to finish their step and save after a request to stop."""

FAILURE_GRACE_S = 5.0
"""How long the other ranks may take to end after one has failed."""

_STOP_TEXT = (
    "finishing the step and saving a checkpoint; a second signal (Ctrl-C) stops at once without "
    "saving"
)
_POLL_S = 0.05
_SAME_SIGNAL_S = 0.5
# A rank that dies without a word is found by polling, its peers' connection errors are not.
_SILENT_DEATH_LEAD_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(
    world_size: int,
    module: str,
    argv: Sequence[str],
    *,
    stop_grace_s: float = STOP_GRACE_S,
    failure_grace_s: float = FAILURE_GRACE_S,
    stop_text: str = _STOP_TEXT,
) -> signal.Signals | None:
    """Run `module` on `world_size` new processes of this machine until all have ended.

    Call it in the main thread. The ranks find each other through the environment variables of
    torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). SIGINT, SIGTERM and SIGHUP
    are passed on once as SIGTERM, upon which ranks finish their step and save; a second one, or
    `stop_grace_s` without an end, kills the ranks.

    Args:
        world_size: number of ranks.
        module: import name of a module with `run(argv, context)`; see `moe_train.rank`.
        argv: passed to `run` on each rank.
        stop_grace_s: seconds that ranks have to save after a request to stop.
        failure_grace_s: seconds that the others have to end after one rank has failed.
        stop_text: what a request to stop is answered with.

    Returns:
        The signal on which the ranks saved and stopped, or None when they ran to the end.

    Raises:
        RankFailedError: a rank failed or was killed; the message begins with the cause.
        StoppedUnsavedError: a second signal came before the ranks had saved.
    """
    check_type("world_size", world_size, int)
    check_type("module", module, str)
    with tempfile.TemporaryDirectory(prefix="moe-train-") as folder:
        run_dir = Path(folder)
        job = RankJob(module=module, argv=list(argv), launcher_pid=os.getpid())
        write_atomic(run_dir / "job.json", json.dumps(asdict(job)))
        supervisor = _Supervisor(run_dir, world_size, stop_grace_s, failure_grace_s, stop_text)
        return supervisor.run()


@dataclass(slots=True)
class _Supervisor:
    """Watches the ranks of one launch from the main thread."""

    _run_dir: Path
    _world_size: int
    _stop_grace_s: float
    _failure_grace_s: float
    _stop_text: str
    _pids: dict[int, int] = field(default_factory=dict)
    _asked: set[int] = field(default_factory=set)
    _ended_s: dict[int, float] = field(default_factory=dict)
    _stop_signal: signal.Signals | None = None
    _stop_s: float = 0.0
    _killed_by: signal.Signals | None = None
    _kill_s: float | None = None
    _kill_reason: str = ""
    _killed: set[int] = field(default_factory=set)

    def run(self) -> signal.Signals | None:
        # Under nohup SIGHUP is ignored, and has to stay so.
        hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [n for n in _SIGNALS if not (n == signal.SIGHUP and hangup_ignored)]
        previous = {number: signal.signal(number, self._on_signal) for number in handled}
        with ThreadPoolExecutor(1, "moe-train-elastic") as thread:
            elastic = thread.submit(_run_elastic, self._run_dir, self._world_size)
            try:
                while not elastic.done():
                    wait([elastic], _POLL_S)
                    self._look()
            finally:
                self._kill_all()
                for number, handler in previous.items():
                    signal.signal(number, handler)
        exit_codes = elastic.result()
        if exit_codes and self._killed_by is not None:
            raise StoppedUnsavedError(
                f"stopped at once by a second {self._killed_by.name}; the last complete checkpoint "
                "stands",
                signal_number=int(self._killed_by),
            )
        if exit_codes:
            raise RankFailedError(self._report(exit_codes))
        return self._stop_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_signal is None:
            self._stop_signal, self._stop_s = signal.Signals(number), now
            self._plan_kill(now + self._stop_grace_s, f"not saved within {self._stop_grace_s:g} s")
            text = f"\n{self._stop_signal.name}: {self._stop_text}\n"
            # Not print: the handler may run in the middle of another write to stderr.
            os.write(sys.stderr.fileno(), text.encode())
        # A terminal and a wrapper may both deliver the same Ctrl-C.
        elif now - self._stop_s > _SAME_SIGNAL_S:
            self._killed_by = signal.Signals(number)
            self._plan_kill(now, f"stopped at once by a second {self._killed_by.name}")

    def _look(self) -> None:
        """Register ranks as they come up, pass the stop on, notice ends, kill what is overdue."""
        for rank in range(self._world_size):
            if rank not in self._pids and rank_file(self._run_dir, rank, "pid").exists():
                self._pids[rank] = int(rank_file(self._run_dir, rank, "pid").read_text())
        now = time.monotonic()
        for rank, pid in self._pids.items():
            if rank not in self._ended_s and not _is_running(pid):
                self._ended_s[rank] = now
        if self._stop_signal is not None:
            for rank in self._pids.keys() - self._asked:
                self._asked.add(rank)
                self._send(rank, signal.SIGTERM)
        if any(self._has_failed(rank) for rank in self._ended_s):
            self._plan_kill(now + self._failure_grace_s, "ended after another rank had failed")
        if self._kill_s is not None and now >= self._kill_s:
            self._kill_all()

    def _has_failed(self, rank: int) -> bool:
        """Whether an ended rank did not say that it was done."""
        return not rank_file(self._run_dir, rank, "done").exists()

    def _plan_kill(self, at_s: float, reason: str) -> None:
        if self._kill_s is None or at_s < self._kill_s:
            self._kill_s, self._kill_reason = at_s, reason

    def _kill_all(self) -> None:
        for rank in self._pids:
            if rank not in self._ended_s and self._send(rank, signal.SIGKILL):
                self._killed.add(rank)

    def _send(self, rank: int, number: signal.Signals) -> bool:
        # Only a child that runs is signalled: the number of a reaped one may be someone else's.
        if not _is_running(self._pids[rank]):
            return False
        if number == signal.SIGKILL and os.getpgid(self._pids[rank]) == self._pids[rank]:
            os.killpg(self._pids[rank], number)  # with whatever the rank has started
        else:
            os.kill(self._pids[rank], number)
        return True

    def _report(self, exit_codes: Mapping[int, int]) -> str:
        """The message for a failed job: the first failure in full, the others in a line each."""
        errors = _read_errors(self._run_dir, self._world_size)
        failed = sorted(set(exit_codes) | set(errors))
        unsaved = [rank for rank in failed if rank not in errors and rank in self._killed]
        causes = [rank for rank in failed if rank not in unsaved]
        if not causes:
            return f"ranks {_numbers(unsaved)} killed: {self._kill_reason}"
        cause = min(causes, key=lambda rank: self._failed_s(rank, errors))
        lines = [_describe(cause, exit_codes.get(cause, 1), errors)]
        for rank in failed:
            if rank in errors and rank != cause:
                summary = shorten(errors[rank].summary, 200, placeholder=" ...")
                lines.append(f"then rank {rank}, step {errors[rank].step}: {summary}")
        if unsaved:
            lines.append(f"then ranks {_numbers(unsaved)} killed: {self._kill_reason}")
        return "\n".join(lines)

    def _failed_s(self, rank: int, errors: Mapping[int, RankError]) -> float:
        if rank in errors:
            return errors[rank].monotonic_s
        # A rank that never came up was ended by elastic with the others, unless it is the only one.
        return self._ended_s.get(rank, math.inf) - _SILENT_DEATH_LEAD_S


def _run_elastic(run_dir: Path, world_size: int) -> dict[int, int]:
    """Start the ranks and wait for their end; the exit codes of those that failed."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "elastic")),
    )
    _quiet_elastic()
    # -P: a module of the current folder must not stand in for an installed one.
    args = ("-P", "-m", "moe_train.rank.rank_main", str(run_dir))
    try:
        elastic_launch(config, sys.executable)(*args)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _quiet_elastic() -> None:
    """Elastic's own reports say less than ours and come in between."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") or name.endswith("launcher.api"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _is_running(pid: int) -> bool:
    """Whether a child of this process has not ended; does not reap it, elastic does."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _read_errors(run_dir: Path, world_size: int) -> dict[int, RankError]:
    errors = {}
    for rank in range(world_size):
        path = rank_file(run_dir, rank, "error.json")
        if path.exists():
            errors[rank] = RankError(**json.loads(path.read_bytes()))
    return errors


def _describe(rank: int, exit_code: int, errors: Mapping[int, RankError]) -> str:
    if rank in errors:
        return f"rank {rank}, step {errors[rank].step}: {errors[rank].text.rstrip()}"
    steps = {error.step for error in errors.values()}
    where = f", step {max(steps)}" if steps else ""
    if exit_code >= 0:
        return f"rank {rank}{where}: ended with exit code {exit_code} and no traceback"
    name = signal.Signals(-exit_code).name
    hint = "; the system does so when memory runs out" if -exit_code == signal.SIGKILL else ""
    return f"rank {rank}{where}: killed by {name}{hint}"


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

"""Start the ranks of a job on this machine, watch them, and end them together.

Ranks are forked where that was prepared (`ForkServer`), and programs of their own elsewhere.
The launcher holds the store in which they meet, so that it outlives each of them.

Invariants: one failing rank ends the job within seconds, and the failure that came first is the one
reported; a stop is passed on to each rank once, as soon as that rank can take it; when `run_local`
returns or raises, no rank is left.

    stopped_by = run_local(4, "moe_train.jobs.rank_job", ["config.toml", ""])
    # None: ran to the end; signal.SIGINT: saved and stopped on Ctrl-C
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from moe_train.cache import write_atomic
from moe_train.errors import RankFailedError, StoppedUnsavedError, check_type
from moe_train.rank import ForkServer, RankError, RankJob, rank_file

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
    started_s: float | None = None,
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
        started_s: when the command was given, on the monotonic clock; None: now.

    Returns:
        The signal on which the ranks saved and stopped, or None when they came to the end; SIGALRM
        where a rank did so for the sake of the job's own time limit.

    Raises:
        RankFailedError: a rank failed or was killed; the message begins with the cause.
        StoppedUnsavedError: a second signal came before the ranks had saved.
    """
    check_type("world_size", world_size, int)
    check_type("module", module, str)
    with tempfile.TemporaryDirectory(prefix="moe-train-") as folder:
        run_dir = Path(folder)
        began_s = time.monotonic() if started_s is None else started_s
        job = RankJob(module=module, argv=list(argv), launcher_pid=os.getpid(), started_s=began_s)
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
    _ready: set[int] = field(default_factory=set)
    _asked: set[int] = field(default_factory=set)
    _exit_codes: dict[int, int] = field(default_factory=dict)
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
        try:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._start(store.port)
            while len(self._exit_codes) < self._world_size:
                time.sleep(_POLL_S)
                self._look()
        finally:
            self._kill(self._pids)
            for rank in self._pids.keys() - self._exit_codes.keys():
                self._reap(rank, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)
        failed = {rank: code for rank, code in self._exit_codes.items() if code}
        if failed and self._killed_by is not None:
            raise StoppedUnsavedError(
                f"stopped at once by a second {self._killed_by.name}; the last complete checkpoint "
                "stands",
                signal_number=int(self._killed_by),
            )
        if failed:
            raise RankFailedError(self._report(failed))
        done = (rank_file(self._run_dir, rank, "done") for rank in range(self._world_size))
        outcomes = {file.read_text() for file in done}
        if outcomes == {"finished"}:  # a signal came in the last step or later
            return None
        return self._stop_signal or (signal.SIGALRM if "out of time" in outcomes else None)

    def _start(self, port: int) -> None:
        size = self._world_size
        environments = [_environment(rank, size, port) for rank in range(size)]
        self._pids.update(enumerate(ForkServer.fork_ranks(self._run_dir, environments)))
        if self._pids:
            return
        # -P: a module of the current folder must not stand in for an installed one.
        program = [sys.executable, "-P", "-m", "moe_train.rank", str(self._run_dir)]
        for rank, environment in enumerate(environments):
            self._pids[rank] = os.posix_spawn(sys.executable, program, environment, setsid=True)

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
        """Notice who is ready and who has ended, pass the stop on, kill what is overdue."""
        now = time.monotonic()
        for rank in self._pids.keys() - self._exit_codes.keys():
            self._reap(rank, os.WNOHANG)
            if rank_file(self._run_dir, rank, "pid").exists():
                self._ready.add(rank)
        if any(self._has_failed(rank) for rank in self._ended_s):
            self._plan_kill(now + self._failure_grace_s, "ended after another rank had failed")
            self._kill(self._pids.keys() - self._ready)  # these have nothing to end
            self._ask_to_stop()
        elif self._stop_signal is not None:
            self._ask_to_stop()
        if self._kill_s is not None and now >= self._kill_s:
            self._kill(self._pids)

    def _ask_to_stop(self) -> None:
        for rank in self._ready - self._asked - self._exit_codes.keys():
            self._asked.add(rank)
            os.kill(self._pids[rank], signal.SIGTERM)

    def _reap(self, rank: int, options: int) -> None:
        """Take the exit code of a rank that has ended, or wait for its end."""
        pid, status = os.waitpid(self._pids[rank], options)
        if pid:
            self._exit_codes[rank] = os.waitstatus_to_exitcode(status)
            self._ended_s[rank] = time.monotonic()

    def _has_failed(self, rank: int) -> bool:
        """Whether an ended rank did not say that it was done."""
        return not rank_file(self._run_dir, rank, "done").exists()

    def _plan_kill(self, at_s: float, reason: str) -> None:
        if self._kill_s is None or at_s < self._kill_s:
            self._kill_s, self._kill_reason = at_s, reason

    def _kill(self, ranks: Iterable[int]) -> None:
        # Only one that was not reaped: its number may be someone else's by now.
        for rank in set(ranks) - self._exit_codes.keys() - self._killed:
            self._killed.add(rank)
            pid = self._pids[rank]
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)  # with whatever the rank has started
            else:
                os.kill(pid, signal.SIGKILL)

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
        return self._ended_s[rank] - _SILENT_DEATH_LEAD_S


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables of one rank: this process's, and those by which torch finds the others."""
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        # So torch takes the store that is there, instead of making one on rank 0.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


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

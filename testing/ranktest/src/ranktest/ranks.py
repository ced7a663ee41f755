"""Fork ranks, gather what each returned or raised, and kill whatever is left at the deadline."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

from ranktest.marks import open_marks

_PR_SET_PDEATHSIG = 1
_SHOW_STACKS = signal.SIGUSR2


class RanksFailedError(AssertionError):
    """At least one rank raised, died or did not finish; the message holds each traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank: its value, the traceback of what it raised, or how it ended."""

    rank: int
    value: object = None
    error: str | None = None
    error_type: str | None = None
    exitcode: int | None = None
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank returned a value."""
        return self.error is None


def run_ranks(
    fn: Callable[[int, int], object], world_size: int, *, timeout_s: float = 60.0, init: bool = True
) -> list[object]:
    """Call `fn(rank, world_size)` on `world_size` forked ranks and return the values by rank.

    With `init` each rank has a gloo process group whose operations time out after `timeout_s`.

    Raises:
        RanksFailedError: a rank raised, died or was still running after `timeout_s`; then with the
            stacks of its threads.
    """
    outcomes = collect_ranks(fn, world_size, timeout_s=timeout_s, init=init)
    failed = [o for o in outcomes if not o.ok]
    if failed:
        raise RanksFailedError(
            f"{len(failed)} of {world_size} ranks failed\n"
            + "\n".join(f"--- rank {o.rank} (exit code {o.exitcode}):\n{o.error}" for o in failed)
        )
    return [o.value for o in outcomes]


def collect_ranks(
    fn: Callable[[int, int], object], world_size: int, *, timeout_s: float = 60.0, init: bool = True
) -> list[Outcome]:
    """As `run_ranks`, but report failures as outcomes: for tests in which ranks die on purpose."""
    context = multiprocessing.get_context("fork")
    processes: list[ForkProcess] = []
    pipes: list[Connection] = []
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranktest-") as folder:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            job = _Job(fn, rank, world_size, folder=folder, init=init, timeout_s=timeout_s)
            process = context.Process(target=_child, args=(job, sender), daemon=True)
            with warnings.catch_warnings():
                # Python >= 3.12 warns that the parent has threads; the children use one only.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            outcomes = _gather(processes, pipes, started_at, started_at + timeout_s, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return outcomes


@dataclass(frozen=True, slots=True)
class _Job:
    fn: Callable[[int, int], object]
    rank: int
    world_size: int
    folder: str
    init: bool
    timeout_s: float


def _gather(
    processes: list[ForkProcess],
    pipes: list[Connection],
    started_at: float,
    deadline: float,
    folder: str,
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(pipes):
        pending = {pipes[r]: r for r in range(len(pipes)) if r not in outcomes}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        elapsed_s = time.monotonic() - started_at
        if not ready:
            for rank in pending.values():
                where = _stacks_of(processes[rank], Path(folder, f"stacks-{rank}"))
                text = f"still running after {elapsed_s:.1f} s; killed\n{where}".rstrip()
                outcomes[rank] = Outcome(
                    rank=rank, error=text, error_type="Timeout", elapsed_s=elapsed_s
                )
            break
        for pipe in ready:
            rank = pending[pipe]  # type: ignore[index]
            outcomes[rank] = _read(pipe, rank, processes[rank], elapsed_s)  # type: ignore[arg-type]
    return [outcomes[rank] for rank in range(len(pipes))]


def _stacks_of(process: ForkProcess, file: Path) -> str:
    """Where a rank's threads are; "" if it does not say so, stopped for instance."""
    before = time.monotonic()
    if not file.is_file() or process.pid is None:
        return ""  # it would die of the signal
    os.kill(process.pid, _SHOW_STACKS)
    while not file.stat().st_size and time.monotonic() - before < 2:
        time.sleep(0.05)
    time.sleep(0.1)  # it may be writing
    return file.read_text()


def _read(pipe: Connection, rank: int, process: ForkProcess, elapsed_s: float) -> Outcome:
    try:
        fields = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        text = f"ended with exit code {process.exitcode} and no result"
        return Outcome(
            rank=rank, error=text, error_type="Died", exitcode=process.exitcode, elapsed_s=elapsed_s
        )
    return Outcome(rank=rank, elapsed_s=elapsed_s, **fields)


def _child(job: _Job, sender: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()  # what the parent made is no garbage here; walking it would copy its pages
    torch.set_num_threads(1)
    open_marks(job.folder)
    stacks = os.open(Path(job.folder, f"stacks-{job.rank}"), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(_SHOW_STACKS, file=stacks)
    try:
        if job.init:
            path = os.path.join(job.folder, "store")
            store = dist.FileStore(path, job.world_size)  # type: ignore[attr-defined]
            timeout = timedelta(seconds=job.timeout_s)
            dist.init_process_group(
                "gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout
            )
        fields: dict[str, object] = {"value": job.fn(job.rank, job.world_size), "exitcode": 0}
        payload = pickle.dumps(fields)
    except BaseException as error:  # noqa: BLE001 - whatever a rank raises is its outcome
        fields = {
            "error": traceback.format_exc(),
            "error_type": type(error).__name__,
            "exitcode": 1,
        }
        payload = pickle.dumps(fields)
    sender.send_bytes(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    if "value" in fields:
        # A rank that ends closes its sockets, upon which a slower peer that still connects a group
        # fails; the parent kills this rank when all have reported. One that failed ends at once,
        # as a real one would, so that its peers notice.
        time.sleep(job.timeout_s)
    # Destroying a group whose peers are gone may wait; the process ends here in any case.
    os._exit(0)

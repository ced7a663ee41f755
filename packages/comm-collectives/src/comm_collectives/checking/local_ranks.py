"""Ranks on this machine that may die, abort or hang without taking the program with them.

The command line starts them, gives them messages and reads what each one answers. A rank that ends
or stays silent is told of as such; nothing here waits for longer than its limit.

    with LocalRanks(2, answer, limit_s=20.0) as ranks:      # answer: run on each rank per message
        for replies in ranks.ask(["one", "two"], limit_s=5.0):
            print([reply.value for reply in replies])
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives.errors import CommError
from comm_collectives.shm import BACKEND_NAME, register_backends

# A fork costs no second import of torch; elsewhere than on Linux it is not safe.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
START_S = 60.0
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a rank answered to one message, or how it ended or that it did not: `lost` says so."""

    value: Any = None
    lost: str = ""
    died: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    answer: Callable[[Any], Any]
    rank: int
    num_ranks: int
    folder: str
    backend: str
    limit_s: float


@final
class LocalRanks:
    """Processes of this machine, each with a process group; killed at the end of the `with`."""

    def __init__(
        self, num_ranks: int, answer: Callable[[Any], Any], *, limit_s: float, backend: str = "gloo"
    ) -> None:
        """Start them and wait until the group stands.

        Args:
            num_ranks: how many.
            answer: called with each message; a function of a module, so that it can be pickled.
            limit_s: limit in seconds of the group's operations.
            backend: of the group: "gloo", or "comm_shm", the one of this package; one that names
                cuda ("cpu:gloo,cuda:nccl") makes a rank's CUDA device that of its new tensors.

        Raises:
            CommError: a rank did not come up.
        """
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="comm-collectives-")
        try:
            for rank in range(num_ranks):
                self._start(_Job(answer, rank, num_ranks, self._folder.name, backend, limit_s))
            for rank, reply in enumerate(self._collect(START_S)):
                if reply.lost:
                    raise CommError(f"rank {rank} did not start: {reply.lost}")
        except BaseException:
            self.close()
            raise

    def ask(self, messages: Sequence[Any], *, limit_s: float) -> Iterator[list[Reply]]:
        """Give every rank the messages at once, and iterate over the replies to each as they come.

        Ends after the first message to which not every rank replied; the ranks are then lost.
        `limit_s` is that of one message.
        """
        for pipe in self._pipes:
            try:
                pipe.send(list(messages))
            except OSError:
                continue  # it has died, which the reply will say
        return self._replies(len(messages), limit_s)

    def close(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, job: _Job) -> None:
        context = multiprocessing.get_context(_START_METHOD)
        ours, theirs = context.Pipe(duplex=True)
        process: BaseProcess = context.Process(target=_rank, args=(job, theirs), daemon=True)  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            # Python >= 3.12 warns that the parent has threads; a rank uses one of its own.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _replies(self, count: int, limit_s: float) -> Iterator[list[Reply]]:
        for _ in range(count):
            replies = self._collect(limit_s)
            yield replies
            if any(reply.lost for reply in replies):
                return

    def _collect(self, limit_s: float) -> list[Reply]:
        deadline = time.monotonic() + limit_s
        replies: dict[int, Reply] = {}
        while len(replies) < len(self._pipes):
            pending = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in replies}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe, rank in pending.items():
                if pipe in ready:
                    replies[rank] = self._read(rank, pipe)
        silent = Reply(lost=f"no answer within {limit_s:g} s")
        return [replies.get(rank, silent) for rank in range(len(self._pipes))]

    def _read(self, rank: int, pipe: Connection) -> Reply:
        try:
            return Reply(value=pipe.recv())
        except (EOFError, OSError):
            return Reply(lost=self._how_it_ended(rank), died=True)

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_END_S)
        code = process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        with open(_stderr_of(self._folder.name, rank), errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        return f"{how}: {lines[-1]}" if lines else how


def _rank(job: _Job, pipe: Connection) -> None:
    # What a rank writes in its agony belongs into the report, not on the user's screen.
    with open(_stderr_of(job.folder, job.rank), "w", buffering=1) as file, redirect_stderr(file):
        os.dup2(file.fileno(), 2)
        faulthandler.disable()
        try:
            _serve(job, pipe)
        except BaseException:
            traceback.print_exc()
            raise


def _serve(job: _Job, pipe: Connection) -> None:
    torch.set_num_threads(1)
    if BACKEND_NAME in job.backend:
        register_backends()
    if "cuda" in job.backend:
        device = torch.device("cuda", job.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{os.path.join(job.folder, 'store')}",
        rank=job.rank,
        world_size=job.num_ranks,
        timeout=timedelta(seconds=job.limit_s),
    )
    pipe.send(None)
    while True:
        try:
            messages = pipe.recv()
        except EOFError:
            return
        for message in messages:
            pipe.send(job.answer(message))


def _stderr_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stderr-{rank}")

"""Ranks on this machine for a while: each in a process group, none of them waited for too long.

A rank that dies, raises or stays silent is told of by its number, those first that were not merely
left alone by others.

    found = run_on_ranks(work, 4, device_type="cpu", timeout_s=60.0)
    found.answers[3]    # what rank 3 gave, one thing after the other
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from mesh_spmd.errors import MeshStateError

_GRACE_S = 5.0  # for others, once one rank is lost; and beyond the limit of the group itself

Work = Callable[[int, torch.device], Iterator[list[str]]]
"""Called on each rank with its number and device. It is pickled where ranks are spawned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What ranks answered, by rank; which of them started; and how others were lost."""

    answers: list[list[list[str]]]
    started: frozenset[int]
    lost: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    work: Work
    world_size: int
    folder: str
    backend: str
    num_devices: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Raised:
    """Sent by a rank in place of an answer."""

    text: str


class _Started:
    """Sent by a rank when its group stands."""


class _Ended:
    """Sent by a rank when it has given all."""


@dataclass(frozen=True, slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection


def run_on_ranks(work: Work, world_size: int, *, device_type: str, timeout_s: float) -> Found:
    """Run `work` on new ranks, and gather what they give until all have ended or one is lost.

    Args:
        work: what each rank runs; it gives its answers one by one.
        world_size: how many ranks.
        device_type: "cpu", or "cuda", whose devices the ranks take in turn; with NCCL where there
            is one for each.
        timeout_s: the longest time between two answers of a rank.

    Raises:
        MeshStateError: there is no device of the kind.
    """
    num_devices, backend = 0, "gloo"
    if device_type == "cuda":
        num_devices = torch.cuda.device_count()
        if not num_devices:
            raise MeshStateError("torch finds no CUDA device on this machine; use --device cpu")
        backend = f"cpu:gloo,cuda:{'nccl' if num_devices >= world_size else 'gloo'}"
    with tempfile.TemporaryDirectory(prefix="mesh-spmd-") as folder:
        job = _Job(
            work=work,
            world_size=world_size,
            folder=folder,
            backend=backend,
            num_devices=num_devices,
            timeout_s=timeout_s,
        )
        with _started(job) as ranks:
            found = _Watch(ranks, job).until_the_end()
            if not found.lost:
                _let_go(ranks)
            return found


@contextmanager
def _started(job: _Job) -> Iterator[list[_Rank]]:
    # A fork costs no second import of torch. It is safe on Linux alone, and not with CUDA.
    method = "fork" if sys.platform == "linux" and not job.num_devices else "spawn"
    context = multiprocessing.get_context(method)
    ranks: list[_Rank] = []
    try:
        for rank in range(job.world_size):
            ours, theirs = context.Pipe(duplex=True)
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_run_rank, args=(job, rank, theirs), daemon=True
            )
            with warnings.catch_warnings():
                # Python >= 3.12 warns that the parent has threads; a rank uses one of its own.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
        yield ranks
    finally:
        for one in ranks:
            one.process.kill()
        for one in ranks:
            one.process.join(_GRACE_S)
            one.pipe.close()


class _Watch:
    """What has come of the ranks so far, and until when a sign of each is due."""

    def __init__(self, ranks: list[_Rank], job: _Job) -> None:
        self._ranks, self._job = ranks, job
        self._limit_s = job.timeout_s + _GRACE_S  # the group's own limit ends first, and says more
        self._pending = {one.pipe: rank for rank, one in enumerate(ranks)}
        self._deadlines = dict.fromkeys(range(len(ranks)), time.monotonic() + self._limit_s)
        self._answers: list[list[list[str]]] = [[] for _ in ranks]
        self._started: set[int] = set()
        self._died: dict[int, str] = {}
        self._raised: dict[int, str] = {}

    def until_the_end(self) -> Found:
        """Wait until all have ended, or one is lost and the others have had their grace."""
        while self._pending:
            due = min(self._deadlines[rank] for rank in self._pending.values())
            ready = wait(list(self._pending), max(0.0, due - time.monotonic()))
            if not ready:
                break
            for pipe in [pipe for pipe in self._pending if pipe in ready]:
                self._take(pipe)
        # Who is silent after another one has died only waits for it.
        silent = {} if self._died else dict.fromkeys(self._pending.values(), self._silence())
        return Found(
            answers=self._answers,
            started=frozenset(self._started),
            lost=self._died | silent | dict(sorted(self._raised.items())),
        )

    def _take(self, pipe: Connection) -> None:
        rank = self._pending[pipe]
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            self._died[rank] = _how_it_ended(self._ranks[rank].process, self._job.folder, rank)
            answer = None
        self._deadlines[rank] = time.monotonic() + self._limit_s
        if isinstance(answer, list):
            self._answers[rank].append(answer)
        elif isinstance(answer, _Started):
            self._started.add(rank)
        elif isinstance(answer, _Ended):
            del self._pending[pipe]
        else:
            del self._pending[pipe]
            if isinstance(answer, _Raised):
                self._raised[rank] = f"failed ({answer.text})"
            soon = time.monotonic() + _GRACE_S
            self._deadlines = {r: min(at, soon) for r, at in self._deadlines.items()}

    def _silence(self) -> str:
        return f"gave no sign within {self._job.timeout_s:g} s"


def _let_go(ranks: list[_Rank]) -> None:
    """All have ended: until now each has kept its connections up for the others."""
    for one in ranks:
        one.pipe.send(None)
    for one in ranks:
        one.process.join(_GRACE_S)


def _how_it_ended(process: BaseProcess, folder: str, rank: int) -> str:
    process.join(_GRACE_S)
    code = process.exitcode
    if code is None:
        how = "closed its pipe"
    elif code < 0:
        names = {int(known): known.name for known in signal.Signals}
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    else:
        how = f"ended with exit code {code}"
    with open(_stderr_of(folder, rank), errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return f"{how} ({lines[-1]})" if lines else how


def _run_rank(job: _Job, rank: int, pipe: Connection) -> None:
    # What a rank writes in its agony belongs into the report, not on the user's screen.
    with open(_stderr_of(job.folder, rank), "w", buffering=1) as file, redirect_stderr(file):
        os.dup2(file.fileno(), 2)
        faulthandler.disable()
        try:
            _work(job, rank, pipe)
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines()
            pipe.send(_Raised(f"{type(error).__name__}: {lines[0] if lines else ''}"))
            raise


def _work(job: _Job, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if job.num_devices:
        device = torch.device("cuda", rank % job.num_devices)
        torch.cuda.set_device(device)
        torch.cuda.init()  # else DeviceMesh chooses again, and refuses odd numbers of ranks
    dist.init_process_group(
        job.backend,
        init_method=f"file://{os.path.join(job.folder, 'store')}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )
    pipe.send(_Started())
    for answer in job.work(rank, device):
        pipe.send(answer)
    pipe.send(_Ended())
    pipe.recv()  # all have ended
    dist.destroy_process_group()


def _stderr_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stderr-{rank}")

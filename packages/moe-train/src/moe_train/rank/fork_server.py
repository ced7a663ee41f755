"""A process that has imported what ranks run, and forks them: they start in milliseconds.

`begin` imports the module in this process, which needs most of it too, and forks the server. It
does so only where this process has had one thread until then: what imports start (OpenBLAS's and
jemalloc's threads) is made to be forked, what work starts (OpenMP's, tokenizers') is not. CUDA may
not be forked either, so where a GPU may be found nothing is made, and ranks are programs of their
own.

Invariant: a rank is a child of the launcher, whoever forked it. A helper of the server forks the
ranks of a launch and ends; the launcher adopts them.

    ForkServer.begin("moe_train.jobs.rank_job")            # before anything else imports torch
    pids = ForkServer.fork_ranks(run_dir, environments)    # []: start them in another way
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar, final

from moe_train.rank.rank import leave
from moe_train.rank.rank_main import run_launched

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PR_SET_CHILD_SUBREAPER = 36
_LAUNCHERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class ForkServer:
    """What this process has of the one that forks its ranks."""

    _of_process: ClassVar[dict[int, "ForkServer"]] = {}
    """By its number: a process that is forked from one with a server has none."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def begin(cls, module: str) -> None:
        """Import the module that ranks will run, and keep a process that forks them from now on.

        Where that cannot be done safely, nothing happens: ranks start all the same.

        Args:
            module: import name, as `run_local` takes it.
        """
        if os.getpid() in cls._of_process or not _can_fork():
            return
        import_module(module)
        own, other = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python >= 3.12 warns of the threads that imports have started.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                own.close()
                _serve(other)
            finally:
                os._exit(0)  # never into the program of the launcher
        other.close()
        cls._of_process[os.getpid()] = cls(own)

    @classmethod
    def fork_ranks(cls, run_dir: Path, environments: Sequence[dict[str, str]]) -> list[int]:
        """Fork one rank for each of these environments, as children of this process.

        Returns:
            Their process numbers; none where there is no server, or none any more.
        """
        server = cls._of_process.get(os.getpid())
        return [] if server is None else server._fork(run_dir, environments)

    def _fork(self, run_dir: Path, environments: Sequence[dict[str, str]]) -> list[int]:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            self._connection.send((run_dir, environments))
            pids: list[int] = self._connection.recv()
            return pids
        except (OSError, EOFError):
            return []
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _can_fork() -> bool:
    """Whether nothing runs beside this thread, and nothing that is forked will meet a GPU."""
    if sys.platform != "linux" or any(Path(name).exists() for name in _GPU_FILES):
        return False
    return len(os.listdir("/proc/self/task")) == 1


def _serve(launcher: Connection) -> None:
    """Fork the ranks of one launch after the other, until the launcher ends."""
    # A Ctrl-C reaches this process too; what it means for ranks is the launcher's to decide.
    hangup = [signal.signal(number, signal.SIG_IGN) for number in _LAUNCHERS_SIGNALS][-1]
    gc.freeze()  # walking what is shared would copy its pages
    while True:
        try:
            run_dir, environments = launcher.recv()
        except EOFError:
            return
        reader, writer = multiprocessing.Pipe(duplex=False)
        helper = os.fork()
        if helper == 0:
            try:
                reader.close()
                launcher.close()
                signal.signal(signal.SIGHUP, hangup)
                writer.send(_fork_all(run_dir, environments))
            finally:
                os._exit(0)
        writer.close()
        try:
            pids = reader.recv()
        except EOFError:
            pids = []
        reader.close()
        os.waitpid(helper, 0)  # from now on the ranks are the launcher's
        launcher.send(pids)


def _fork_all(run_dir: Path, environments: Sequence[dict[str, str]]) -> list[int | None]:
    """The process numbers of the ranks: all, or none where one cannot be forked."""
    fork, here = multiprocessing.get_context("fork"), os.getpid()
    ranks = [fork.Process(target=_run_rank, args=(run_dir, e, here)) for e in environments]
    try:
        for rank in ranks:
            rank.start()
    except OSError:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
        return []
    return [rank.pid for rank in ranks]


def _run_rank(run_dir: Path, environment: dict[str, str], helper_pid: int) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    while os.getppid() == helper_pid:
        time.sleep(0.001)  # a helper ends at once
    leave(run_launched(run_dir))

"""Start N gloo ranks on this machine, for the command line, and never wait for one that hangs.

answers = run_local("comm_collectives.check:rank_main", 2, timeout_s=60)
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from comm_collectives.errors import CommError

# A fork costs no second import of torch; elsewhere than on Linux it is not safe.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def run_local(entry: str, num_ranks: int, *, timeout_s: float) -> list[str]:
    """Call the function `module:name` on `num_ranks` new processes and return each one's text.

    The function takes no arguments and finds a gloo process group initialised.

    Raises:
        CommError: a rank died, raised or did not finish within `timeout_s`; the text names it.
    """
    context = multiprocessing.get_context(_START_METHOD)
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="comm-collectives-") as folder:
        store = os.path.join(folder, "store")
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                args = (entry, rank, num_ranks, store, timeout_s, sender)
                process: BaseProcess = context.Process(target=_rank, args=args, daemon=True)  # type: ignore[attr-defined]
                with warnings.catch_warnings():
                    # Python >= 3.12 warns that the parent has threads; a rank uses one of its own.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                processes.append(process)
                pipes[receiver] = rank
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Connection, int], timeout_s: float) -> list[str]:
    deadline = time.monotonic() + timeout_s
    answers: dict[int, str] = {}
    pending = dict(pipes)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = ", ".join(str(rank) for rank in sorted(pending.values()))
            raise CommError(f"ranks {ranks} did not finish within {timeout_s:g} s")
        for pipe in list(pending):
            if pipe in ready:
                rank = pending.pop(pipe)
                try:
                    ok, text = pipe.recv()
                except EOFError as error:
                    raise CommError(f"rank {rank} died without a word") from error
                if not ok:
                    raise CommError(f"rank {rank} failed: {text}")
                answers[rank] = text
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    entry: str, rank: int, num_ranks: int, store_path: str, timeout_s: float, sender: Connection
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store_path}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        module, name = entry.split(":")
        text = getattr(importlib.import_module(module), name)()
        sender.send((True, text))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        sender.send((False, f"{type(error).__name__}: {error}"))

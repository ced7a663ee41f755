"""The pieces of a source, made by several processes.

Invariant: no more pieces are under way than twice the processes, and each lies on the disk when it
is made; so memory does not grow with the corpus, and after a kill at any moment only pieces under
way are made again.

    make_pieces(plan, tokenizer, folder, workers=4)
    take_piece(folder, 0, plan.pieces[0])
"""

import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from moe_train.errors import MoeTrainError
from moe_train.reading import SourcePlan, Span, make_piece, piece_path, store_task
from moe_train.tokenization import TextTokenizer

_LINE_INTERVAL_S = 10.0
_FEW_PIECES = 2  # are made before another process has started

logger = logging.getLogger(__name__)


def make_pieces(plan: SourcePlan, tokenizer: TextTokenizer, folder: Path, workers: int) -> None:
    """Make the pieces that `folder` does not have yet.

    Raises:
        ValueError: a file or row is not what the job expects.
        MoeTrainError: a process was ended from outside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = plan.pieces
    store_task(folder, plan.job, tokenizer)
    missing = [index for index in range(len(pieces)) if not piece_path(folder, index).exists()]
    if len(missing) < len(pieces):
        kept = len(pieces) - len(missing)
        logger.info("going on: %d of %d pieces are ready from before", kept, len(pieces))
    sizes = [sum(span.size_bytes for span in piece) for piece in pieces]
    ready = sum(sizes) - sum(sizes[index] for index in missing)
    with _Shown(sum(sizes), ready) as shown:
        if workers == 1 or len(missing) <= _FEW_PIECES:
            for index in missing:
                shown.advance(sizes[make_piece(folder, index, pieces[index])])
            return
        with _Workers(min(workers, len(missing))) as pool:
            under_way: set[Future[int]] = set()
            for index in missing:
                under_way.add(pool.submit(folder, index, pieces[index]))
                if len(under_way) >= 2 * workers:
                    under_way = _collected(under_way, sizes, shown)
            while under_way:
                under_way = _collected(under_way, sizes, shown)


def usable_cores() -> int:
    """How many processes may run at once here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _collected(
    under_way: set[Future[int]], sizes: Sequence[int], shown: "_Shown"
) -> set[Future[int]]:
    """Wait until a piece is made; those that are still under way."""
    done, rest = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        shown.advance(sizes[future.result()])
    return rest


class _Workers:
    """Processes that make pieces, each asked by a thread of this one; all end with the block."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        self._open = ExitStack()

    def __enter__(self) -> "_Workers":
        with ExitStack() as opened:
            opened.enter_context(self._threads)
            for _ in range(self._count):
                worker = _Worker()
                opened.callback(worker.end)
                self._idle.put(worker)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._open.close()

    def submit(self, folder: Path, index: int, spans: Sequence[Span]) -> Future[int]:
        """Have the next idle process make a piece."""
        return self._threads.submit(self._make, folder, index, spans)

    def _make(self, folder: Path, index: int, spans: Sequence[Span]) -> int:
        worker = self._idle.get()
        try:
            failure = worker.ask(folder, index, spans)
        except (OSError, EOFError) as error:
            raise MoeTrainError(
                "a process that prepares the corpus was ended from outside (by lack of memory?); "
                "start again, it goes on where it was, with fewer processes if "
                f"data.num_workers={self._count} are too many"
            ) from error
        finally:
            self._idle.put(worker)
        if failure is not None:
            raise failure
        return index


class _Worker:
    """A process that is a program of its own.

    One that multiprocessing starts imports the main module again. Where that is a script that
    starts a job, it would wait for the very corpus that it should prepare.
    """

    def __init__(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        with other:
            socket = other.fileno()
            program = [sys.executable, "-P", "-m", "moe_train.reading", str(socket)]
            self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, pass_fds=[socket])

    def ask(self, *piece: object) -> BaseException | None:
        """Have it make a piece; what was raised there."""
        self._connection.send(piece)
        failure: BaseException | None = self._connection.recv()
        return failure

    def end(self) -> None:
        """End it, in the midst of a piece, too."""
        self._process.terminate()
        self._process.wait()


class _Shown:
    """How far it is: a bar on a terminal, else a line from time to time."""

    def __init__(self, total_bytes: int, ready_bytes: int) -> None:
        self._total, self._done, self._before = total_bytes, ready_bytes, ready_bytes
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = ("preparing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total_bytes, completed=ready_bytes)

    def __enter__(self) -> "_Shown":
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self, size: int) -> None:
        self._done += size
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task, size)
        elif now - self._said >= _LINE_INTERVAL_S:
            self._said = now
            rate = (self._done - self._before) / (now - self._started)
            logger.info(
                "prepared %.0f of %.0f MB, %.1f MB/s, %.0f s left",
                self._done / 1e6,
                self._total / 1e6,
                rate / 1e6,
                (self._total - self._done) / rate,
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

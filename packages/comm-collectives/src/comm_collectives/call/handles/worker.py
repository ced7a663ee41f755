"""The thread on which asynchronous calls run, and who waits for it.

A thread that waits for a call which has not begun carries it out itself, after those before it:
that takes no change of thread. So whoever is in a call is `is_here`, whichever thread that is.

    worker = Worker("comm_collectives default", owner)
    worker.submit(run).result()
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Any, TypeVar, final

import torch

from comm_collectives.call.handles.caught import Caught
from comm_collectives.threads import Thread, Threads, this_thread

T = TypeVar("T")


@final
class Awaiting:
    """The threads of a program that have jobs run for them, and those that do nothing but wait."""

    def __init__(self) -> None:
        self._users = Threads()
        self._waiting: dict[Thread, Future[Any]] = {}

    def use(self) -> None:
        """Note that this thread has a job run."""
        self._users.add()

    def begin(self, future: "Future[Any]") -> None:
        """Note that this thread waits for a job, without a limit."""
        self._waiting[this_thread()] = future

    def end(self) -> None:
        """Note that it goes on."""
        self._waiting.pop(this_thread(), None)

    def is_all(self, users: Set[Thread]) -> bool:
        """Whether these threads of the program, and those that use this, all wait here.

        A thread whose job has ended goes on, though it may not have noted that yet.
        """
        waiting = {mark for mark, future in self._waiting.copy().items() if not future.done()}
        return waiting >= self._users.alive() | users


@final
class Worker:
    """The thread on which calls of `owner` run in the order in which they were made.

    Ends with its owner.
    """

    def __init__(self, name: str, owner: object) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one for each job at least
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._submitted = 0  # counted by callers, and `_done` by who runs jobs
        self._done = self._runner = 0
        self._streams: dict[torch.device, torch.Stream] = {}
        self.awaiting = Awaiting()
        threading.Thread(target=self._work, name=name, daemon=True).start()
        weakref.finalize(owner, self._wakes.put, False).atexit = False

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or runs here."""
        return self._submitted > self._done

    def is_here(self) -> bool:
        """Whether this is the thread that runs a call here."""
        return threading.get_ident() == self._runner

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        """Run a function after those submitted before; in a job's callback, after that job."""
        future: _Future[T] = _Future(self)

        def job() -> None:
            with Caught() as caught:
                future.set_result(run())
            if caught.error is not None:
                future.set_exception(caught.error)

        if self.is_here():  # else who waits for it here would wait for this thread
            job()
            return future
        self.awaiting.use()
        with self._lock:
            self._submitted += 1
            self._jobs.append(job)
            self._wakes.put(True)
        return future

    def stream(self, device: torch.device) -> torch.Stream:
        """The stream on which calls of this group run on `device`."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        return self._streams[device]

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        """Run jobs on this thread until that is enough, unless another thread runs one."""
        if self.is_here():  # in a job's callback; what that waits for would wait for it
            self._run_while_needed(is_enough)
        elif self._running.acquire(blocking=False):
            try:
                self._run_while_needed(is_enough)
            finally:
                self._running.release()

    def _run_while_needed(self, is_enough: Callable[[], bool]) -> None:
        while self._jobs and not is_enough():
            self._run_next()

    def _work(self) -> None:
        while self._wakes.get():
            with self._running:
                if self._jobs:  # else whoever waits for it has run it
                    self._run_next()

    def _run_next(self) -> None:
        outer, self._runner = self._runner, threading.get_ident()
        try:
            self._jobs.popleft()()
        finally:
            self._runner = outer
            self._done += 1


@final
class _Future(Future[T]):
    """A future whose job runs on the thread that waits for it, if it has not begun."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def result(self, timeout: float | None = None) -> T:
        """As usual."""
        if timeout is not None or self.done():
            if self._worker.is_here():
                self._worker.run_until(self.done)
            return super().result(timeout)
        self._worker.awaiting.begin(self)
        try:
            self._worker.run_until(self.done)
            return super().result()
        finally:
            self._worker.awaiting.end()

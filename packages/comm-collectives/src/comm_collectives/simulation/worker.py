"""Asynchronous calls of simulated ranks: a task of the scheduler instead of a thread."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar, final

from comm_collectives.call.handles import Awaiting, Caught
from comm_collectives.simulation.scheduler import Scheduler, Signal, Task, Unwound
from comm_collectives.simulation.world import World

T = TypeVar("T")


@final
class SimWorker:
    """Runs the asynchronous calls of one group on one rank in their order, beside the program."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._jobs: deque[Callable[[], None]] = deque()
        self._task: Task | None = None
        self.awaiting = Awaiting()

    @property
    def is_busy(self) -> bool:
        """Whether a call waits or runs here."""
        return self._task is not None

    def is_here(self) -> bool:
        """Whether this is the worker's own task."""
        return self._world.scheduler.is_running(self._task)

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        """Run a function after those submitted before; in a job's callback, after that job."""
        future: _Future[T] = _Future(self._world.scheduler, self.awaiting)

        def job() -> None:
            with Caught(passing=(Unwound,)) as caught:
                future.set_result(run())
            if caught.error is not None:
                future.set_exception(caught.error)
            self._world.scheduler.fire(future.signal)

        if self.is_here():
            job()
            return future
        self.awaiting.use()
        self._jobs.append(job)
        if self._task is None:
            self._task = self._world.spawn(self._rank, self._work)
        return future

    def _work(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._task = None


@final
class _Future(Future[T]):
    """A future that lets the other tasks run while one waits for it."""

    def __init__(self, scheduler: Scheduler, awaiting: Awaiting) -> None:
        super().__init__()
        self.signal = Signal()
        self._scheduler, self._awaiting = scheduler, awaiting

    def result(self, timeout: float | None = None) -> T:
        """As usual, in virtual time."""
        if timeout is None:
            self._awaiting.begin(self)
        try:
            self._block(None if timeout is None else self._scheduler.now_s + timeout)
        finally:
            self._awaiting.end()
        return super().result(0)

    def _block(self, deadline_s: float | None) -> None:
        while not self.done():
            if deadline_s is not None and self._scheduler.now_s >= deadline_s:
                raise FutureTimeoutError
            self._scheduler.block(self.signal, deadline_s)

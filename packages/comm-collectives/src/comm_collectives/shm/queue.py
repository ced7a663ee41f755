"""The order of a group's collectives on this rank, and who carries them out.

Collectives of one group run one after another, in the order in which they were called. Whoever
waits for one carries it out, together with those before it; a thread of the group's own does it for
those that nobody waits for yet, so that asynchronous calls go on while the program does something
else. A call that somebody waits for at once costs no change of thread.

    queue = Queue(channel)
    queue.run(operation)                     # to its end, or raises
    task = queue.submit(operation)
    queue.wait(task, timeout_s=5.0)          # a limit that passes leaves the call under way
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import final

import torch
import torch.distributed as dist

from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    PeerFailedError,
    RefusedError,
)
from comm_collectives.shm.channel import Channel, LeftEarlierError
from comm_collectives.shm.moves import Steps

# The group's thread looks for work so often, and goes to sleep after so many looks in vain. It is
# not woken for each call, since a caller who is about to wait would share a core with it.
_SPIN_S, _SPINS = 2e-4, 100
_NOW = -math.inf
_CLOSE_S = 0.1
_FAILURES = (RuntimeError, ValueError, TypeError, MemoryError, OSError)


@dataclass(slots=True, kw_only=True)
class Operation:
    """A collective to be carried out.

    Attributes:
        name: for errors.
        steps: starts its shared steps.
        over_gloo: does it without shared memory.
        is_gloo: whether gloo does it in any case, once the shared steps have shown agreement.
        limit_s: how long it may take.
        results: the tensors that it fills, as its future gives them.
        landings: (tensor, contiguous stand-in that the operation fills) pairs to copy at the end.
    """

    name: str
    steps: Callable[[Channel], Steps]
    over_gloo: Callable[[], dist.Work | None]
    is_gloo: bool = False
    limit_s: float = math.inf
    results: Sequence[torch.Tensor] = ()
    landings: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


@final
class Task:
    """An operation in the queue. Whoever drives the queue moves it; anybody may wait for it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.done = False
        self.error: Exception | None = None
        self._steps: Steps | None = None
        self._work: dist.Work | None = None
        self._deadline = math.inf
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def advance(self, channel: Channel, until: float) -> bool:
        """Go on to the end, well or with `error`; False if `until` comes first."""
        try:
            return self._go_on(channel, until)
        except LeftEarlierError:
            channel.leave()
            self._steps = None
            return self.advance(channel, until)
        except (MismatchError, RefusedError) as error:
            # Raised by all ranks in the same step: they are still together.
            self._end(error)
        except _FAILURES as error:
            if self._steps is not None:
                channel.leave()
            self._end(error)
        except BaseException:
            channel.leave()
            self._end(CommError(f"{self.operation.name} was interrupted"))
            raise
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody else has carried it out; False if not in time."""
        with self._lock:
            if self.done:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(None if timeout_s == math.inf else max(0.0, timeout_s))

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of its results."""
        with self._lock:
            if self._future is not None or not self.done:
                self._future = self._future or torch.futures.Future()
                return self._future
            future = self._future = torch.futures.Future()
        self._settle(future)
        return future

    def _go_on(self, channel: Channel, until: float) -> bool:
        operation = self.operation
        if self._steps is None and self._work is None:
            self._deadline = time.monotonic() + operation.limit_s
            if not channel.is_open:
                return self._begin_gloo(until)
            channel.begin()
            self._steps = operation.steps(channel)
            next(self._steps)
        if self._steps is not None:
            while self._arrived(channel, until):
                if next(self._steps, self) is self:
                    break
            else:
                return False
            self._steps = None
            if operation.is_gloo:
                return self._begin_gloo(until)
            self._end(None)
            return True
        return self._end_gloo(until)

    def _arrived(self, channel: Channel, until: float) -> bool:
        try:
            if channel.arrived(min(until, self._deadline)):
                return True
        except PeerFailedError as error:
            raise PeerFailedError(f"{self.operation.name} failed: {error}") from error
        if time.monotonic() >= self._deadline:
            raise CollectiveTimeoutError(
                f"{self.operation.name}: Timed out after {self.operation.limit_s:g} s; "
                f"did not arrive: {named(channel.missing())}"
            )
        return False

    def _begin_gloo(self, until: float) -> bool:
        self._work = self.operation.over_gloo()
        return self._end_gloo(until)

    def _end_gloo(self, until: float) -> bool:
        work = self._work
        if work is not None and not _ended(work, until):
            return False
        self._end(None)
        return True

    def _end(self, error: Exception | None) -> None:
        self._steps = None
        if error is None and self.operation.landings:
            # Tensors made in inference mode may be written to in no other.
            with torch.inference_mode():
                for tensor, stand_in in self.operation.landings:
                    tensor.copy_(stand_in)
        with self._lock:
            self.error = error
            self.done = True
            event, future = self._event, self._future
        if event is not None:
            event.set()
        if future is not None:
            self._settle(future)

    def _settle(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self.error is not None:
            future.set_exception(self.error)  # type: ignore[arg-type]
        else:
            future.set_result(list(self.operation.results))


@final
class Queue:
    """The collectives of one group on this rank, first in, first out."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tasks: deque[Task] = deque()
        self._driving = threading.Lock()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._is_awake = False

    def run(self, operation: Operation) -> Task:
        """Carry out an operation, after those before it.

        Raises:
            RuntimeError: it failed.
        """
        task = Task(operation)
        self._tasks.append(task)
        if not self._drive(task, math.inf):
            self._ring()
        self.wait(task, None)
        return task

    def submit(self, operation: Operation) -> Task:
        """Have an operation carried out, after those before it."""
        task = Task(operation)
        self._tasks.append(task)
        # As far as it goes without waiting, so that the others can take what this rank has.
        self._drive(task, _NOW)
        if not task.done:
            self._ring()
        return task

    def wait(self, task: Task, timeout_s: float | None) -> None:
        """Wait for the end of a task.

        Raises:
            CollectiveTimeoutError: it did not come in time; the operation goes on.
            RuntimeError: the operation failed.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        if not task.done:
            self._drive(task, until)
            if not task.wait(until - time.monotonic()):
                raise CollectiveTimeoutError(
                    f"{task.operation.name}: Timed out after {timeout_s:g} s of waiting for it; "
                    f"did not arrive: {named(self._channel.missing())}"
                )
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """Leave the shared memory, and let the group's thread end; a call under way goes on."""
        self._bell.put(False)
        if self._driving.acquire(timeout=_CLOSE_S):
            self._channel.close()
            self._driving.release()

    def _ring(self) -> None:
        """See to it that the group's thread looks for work."""
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="comm_shm", daemon=True)
            self._worker.start()
        if not self._is_awake:
            self._is_awake = True
            self._bell.put(True)

    def _work(self) -> None:
        while self._bell.get():
            looks = 0
            while looks < _SPINS:
                time.sleep(_SPIN_S)
                looks += 1
                if self._tasks:
                    looks = 0
                    with self._driving:
                        self._carry_out(None, math.inf)
            # A call that found this thread awake was appended before, so it is seen here.
            self._is_awake = False
            if self._tasks:
                self._ring()

    def _drive(self, task: Task, until: float) -> bool:
        """Carry out what comes before `task`, and it, unless another thread is at it."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            self._carry_out(task, until)
        finally:
            self._driving.release()
        return True

    def _carry_out(self, last: Task | None, until: float) -> None:
        tasks = self._tasks
        while tasks and not (last is not None and last.done):
            # One that was interrupted is done, and still here.
            if not tasks[0].done and not tasks[0].advance(self._channel, until):
                return
            tasks.popleft()


@final
class ShmWork(dist.Work):
    """The handle of one collective, in the terms of `torch.distributed`."""

    def __init__(self, queue: Queue, task: Task) -> None:
        super().__init__()
        self._queue, self._task = queue, task

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; zero waits as long as the operation may take.

        Raises:
            CollectiveTimeoutError: `timeout` passed; the operation goes on.
            RuntimeError: the operation failed.
        """
        limit_s = timeout.total_seconds()
        self._queue.wait(self._task, limit_s if limit_s > 0 else None)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        return self._task.done

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._task.done and self._task.error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed, None if it did not."""
        return self._task.error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors that the operation fills."""
        return self._task.future()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation fills."""
        return list(self._task.operation.results)


def named(ranks: Sequence[int]) -> str:
    """Return ranks as words."""
    if not ranks:
        return "nobody is missing here, an earlier call is still under way"
    return ", ".join(f"rank {rank}" for rank in ranks)


def _ended(work: dist.Work, until: float) -> bool:
    """Wait for gloo; False if `until` comes before the end. Raises what the operation raised."""
    if until == math.inf:
        work.wait()
        return True
    if until == _NOW and not work.is_completed():
        return False
    try:
        work.wait(timedelta(seconds=max(0.001, until - time.monotonic())))
    except RuntimeError:
        if work.is_completed():
            work.wait()
            return True
        return False
    return True

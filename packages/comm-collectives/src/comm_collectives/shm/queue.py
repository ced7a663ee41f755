"""The order of a group's collectives on this rank, and who carries them out.

Collectives of one group run one after another, in the order in which they were called. Whoever
waits for one carries it out, together with those before it; a thread of the group's own does it for
those that nobody waits for yet, so that asynchronous calls go on while the program does something
else. A call that somebody waits for at once costs no change of thread.

    queue = Queue(calls)
    queue.run(operation)                     # to its end, or raises
    task = queue.submit(operation)
    queue.wait(task, timeout_s=5.0)          # a limit that passes leaves the call under way
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import final

import torch
import torch.distributed as dist

from comm_collectives.errors import CollectiveTimeoutError, CommError
from comm_collectives.shm.arguments import Landings, Tensors
from comm_collectives.shm.calls import Call, Calls
from comm_collectives.shm.heads import Head

# The group's thread looks for work so often, and goes to sleep after so many looks in vain. It is
# not woken for each call, since a caller who is about to wait would share a core with it.
_SPIN_S, _SPINS = 2e-4, 100
_CLOSE_S = 0.1
_FAILURES = (RuntimeError, ValueError, TypeError, MemoryError, OSError)


@dataclass(slots=True)
class Operation:
    """A collective to be carried out.

    Attributes:
        head: what the ranks compare.
        run: makes it.
        results: the tensors that it fills, as its future gives them.
        landings: (tensor, contiguous stand-in that the operation fills) pairs to copy at the end.
        limit_s: how long a rank waits for the others.
    """

    head: Head
    run: Callable[[Call], None]
    results: Tensors = ()
    landings: Landings = field(default_factory=list)
    limit_s: float = math.inf


@final
class Task:
    """An operation in the queue. Whoever drives the queue carries it out; anybody may wait."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.error: Exception | None = None
        self.done = False  # well or not
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def carry_out(self, calls: Calls) -> None:
        """Make the call to its end, well or with `error`."""
        operation = self.operation
        try:
            with calls.begin(operation.head, operation.limit_s, operation) as call:
                operation.run(call)
            if operation.landings:
                # Tensors made in inference mode may be written to in no other.
                with torch.inference_mode():
                    for tensor, stand_in in operation.landings:
                        tensor.copy_(stand_in)
        except _FAILURES as error:
            self._end(error)
        except BaseException:
            self._end(CommError(f"{operation.head.operation} was interrupted"))
            raise
        else:
            self._end(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody else has carried it out; False if not in time."""
        with self._lock:
            if self.done:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout_s)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return the future of its results."""
        with self._lock:
            future, is_new = self._future, self._future is None
            if future is None:
                future = self._future = torch.futures.Future()
            done = self.done
        if done and is_new:
            self._settle(future)
        return future

    def _end(self, error: Exception | None) -> None:
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

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
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
        self.wait(task, None)
        return task

    def submit(self, operation: Operation) -> Task:
        """Have an operation carried out, after those before it."""
        task = Task(operation)
        self._tasks.append(task)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="comm_shm", daemon=True)
            self._worker.start()
        self._ring()
        return task

    def wait(self, task: Task, timeout_s: float | None) -> None:
        """Wait for the end of a task.

        Raises:
            CollectiveTimeoutError: it did not come in time; the operation goes on.
            RuntimeError: the operation failed.
        """
        if timeout_s is None:
            self._drive(task)
        elif not task.wait(timeout_s):
            raise CollectiveTimeoutError(
                f"{task.operation.head.operation} of group {self._calls.names}: "
                f"Timed out after {timeout_s:g} s of waiting for it; "
                f"did not arrive: {self._calls.named(self._calls.missing())}"
            )
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """Leave the group, and let its thread end; a call under way goes on."""
        self._bell.put(False)
        if self._driving.acquire(timeout=_CLOSE_S):
            self._calls.frames.streams.close()
            self._driving.release()

    def _ring(self) -> None:
        """See to it that the group's thread looks for work."""
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
                    self._drive(None)
            # A call that found this thread awake was appended before, so it is seen here.
            self._is_awake = False
            if self._tasks:
                self._ring()

    def _drive(self, last: Task | None) -> None:
        """Carry out what comes before `last`, and it; without one, all there is."""
        while not last.done if last is not None else self._tasks:
            with self._driving:
                # The thread that had the lock before may have come to the end.
                if self._tasks and not (last is not None and last.done):
                    self._tasks.popleft().carry_out(self._calls)


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

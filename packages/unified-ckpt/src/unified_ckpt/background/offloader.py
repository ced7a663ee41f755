"""Copies a snapshot chunk by chunk while the trainer computes.

What lies in CPU memory is copied by a thread, in calls that hold no interpreter lock; what lies on
a CUDA device is copied by a stream of its own into pinned memory. The tensors must not change
between `start` and the end of `finish`.

    offloader.start(tensors, buffer.views(layout), layout)
    offloader.issue_next()  # returns at once
    offloader.finish(submit, on_error=print, timeout_s=60)  # the rest; then calls submit()
"""

import contextlib
import ctypes
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from unified_ckpt.background.cuda_copies import DeviceCopies
from unified_ckpt.background.offload_plan import ByteSlice, OffloadPlan, plan_offload
from unified_ckpt.devices import is_plain_device_memory
from unified_ckpt.errors import SaveError
from unified_ckpt.geometry.tensors import bits_of, is_plain_memory
from unified_ckpt.snapshots import StagingLayout

_Task = Callable[[], object]
_JOIN_TIMEOUT_S = 60.0
_FAILURES = (RuntimeError, ValueError, OSError)  # of a copy, or of what is called after it


class Offloader:
    """One thread, and one stream where there are device tensors; used by one trainer thread.

    Args:
        num_chunks: into which a snapshot is cut.
    """

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_issued = 0
        self._num_done = 0
        self._error: Exception | None = None
        self._sources: Sequence[torch.Tensor] = ()
        self._views: Sequence[torch.Tensor] = ()
        self._layout: StagingLayout | None = None
        self._plan = OffloadPlan(())
        self._next = 0
        self._device = DeviceCopies()
        self._on_device = False
        name = "unified-ckpt-offloader"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def plan(self, tensors: Sequence[torch.Tensor], layout: StagingLayout) -> None:
        """Plan the chunks of such a snapshot; `start` does it where it has not been done."""
        if self._layout is not layout:
            divisible = [is_plain_memory(t) or is_plain_device_memory(t) for t in tensors]
            sizes = [entry.num_bytes for entry in layout.entries]
            self._plan = plan_offload(sizes, num_chunks=self._num_chunks, divisible=divisible)
            self._layout = layout

    def start(
        self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor], layout: StagingLayout
    ) -> None:
        """Begin a snapshot: `views`, the staging memory of the layout, get the tensors' values."""
        self.plan(tensors, layout)
        self._sources, self._views, self._next = tensors, views, 0
        self._error = None
        self._on_device = not all(tensor.is_cpu for tensor in tensors)
        self._device.start()

    @property
    def chunks_left(self) -> int:
        """Number of chunks that have not been issued."""
        return len(self._plan.chunks) - self._next

    @property
    def busy(self) -> bool:
        """Whether copies, or what is called after them, are still under way."""
        return self._num_done < self._num_issued

    def issue_next(self) -> None:
        """Let the next chunk be copied, if one is left; returns at once.

        A copy that cannot be begun makes `finish` raise.
        """
        if self.chunks_left:
            chunk, sources, views = self._plan.chunks[self._next], self._sources, self._views
            self._next += 1
            self._issue_on_device(chunk)
            self._put(lambda: _copy_chunk(chunk, sources, views))

    def finish(
        self,
        then: Callable[[], object],
        *,
        on_error: Callable[[SaveError], object],
        timeout_s: float,
    ) -> None:
        """Copy what is left, wait until the tensors may change, then call `then`.

        Device copies are not waited for here, but by the device's current stream; `then`, or
        `on_error` where one failed, is called on the copying thread when they are done.
        """
        self._copy_rest()
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._num_done == self._num_issued, timeout=timeout_s
            ):
                raise SaveError(f"copying the state did not end within {timeout_s:g} s")
        self._sources = self._views = ()
        if self._error is not None:
            raise SaveError(f"copying the state failed: {self._error}") from self._error
        done = self._device.finish()
        if done is None:
            then()
        else:
            self._put(lambda: _end_device(done, then, on_error))

    def _copy_rest(self) -> None:
        """Copy what is left on two threads, each of which takes the next chunk when it can."""
        left = deque(self._plan.chunks[self._next :])
        self._next = len(self._plan.chunks)
        for chunk in left:
            self._issue_on_device(chunk)
        sources, views = self._sources, self._views

        def copy_all() -> None:
            while left:
                try:
                    chunk = left.popleft()
                except IndexError:  # the other thread was faster
                    return
                _copy_chunk(chunk, sources, views)

        if len(left) > 1:
            self._put(copy_all)
        try:
            copy_all()
        except _FAILURES as error:
            self._error = error

    def _issue_on_device(self, chunk: Sequence[ByteSlice]) -> None:
        if self._on_device:
            try:
                self._device.issue(chunk, self._sources, self._views)
            except _FAILURES as error:
                self._error = error

    def close(self) -> None:
        """End the thread after its last task; one that is stuck is left behind."""
        self._tasks.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _put(self, task: _Task) -> None:
        self._num_issued += 1
        self._tasks.put(task)

    def _run(self) -> None:
        # Its wake-ups must not push the training thread off a core; its share of time is the same.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except _FAILURES as error:
                self._error = error
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()


def _end_device(
    done: Callable[[], object], then: Callable[[], object], on_error: Callable[[SaveError], object]
) -> None:
    try:
        done()
    except RuntimeError as error:
        on_error(SaveError(f"copying the state failed: {error}"))
    else:
        then()


def _copy_chunk(
    chunk: Sequence[ByteSlice], sources: Sequence[torch.Tensor], views: Sequence[torch.Tensor]
) -> None:
    for index, begin, end in chunk:
        source, view = sources[index], views[index]
        if is_plain_memory(source):
            ctypes.memmove(view.data_ptr() + begin, source.data_ptr() + begin, end - begin)
        elif source.device.type == "cpu":
            with torch.no_grad():
                bits_of(view).copy_(bits_of(source.detach()))

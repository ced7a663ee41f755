"""The allocator that programs hold: `TwoPoolPolicy` made safe for threads and finalizers.

Frees may come from finalizers at any moment: in a thread that is already inside the allocator (a
garbage collection during `malloc`), or while another thread is. `free` therefore never waits; a
free that finds the allocator busy is queued and done by the next call. When a request finds no
room, `on_exhausted` (garbage collection) runs without the lock and the request is tried once more
before `OutOfMemoryError` is raised.

Invariant: no two live allocations overlap, and a pointer is freed exactly once.

>>> from gpu_alloc.sources import AddressSource
>>> allocator = TwoPoolAllocator(AddressSource(1 << 30))
>>> allocation = allocator.malloc(1000)
>>> allocation.size
1024
>>> allocator.free(allocation.ptr)
"""

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar, final

from gpu_alloc.core.block import Block
from gpu_alloc.core.config import AllocatorConfig
from gpu_alloc.core.deferred import DeferredFrees
from gpu_alloc.core.oom import OomReport, OutOfMemoryError
from gpu_alloc.core.policy import TwoPoolPolicy
from gpu_alloc.core.snapshot import Snapshot, take_snapshot
from gpu_alloc.core.stats import Stats
from gpu_alloc.errors import (
    AllocValueError,
    ClosedError,
    InvalidFreeError,
    check_kind,
    check_limit,
    refuse_free,
    refuse_reentry,
    stream_number,
    whole_number,
)
from gpu_alloc.events import TraceEvent
from gpu_alloc.plan import LifetimePlan, PlanUse
from gpu_alloc.sources import ChunkSource, StreamEvents

_T = TypeVar("_T")


class Allocation(NamedTuple):
    """What `malloc` returns: the address, and the usable bytes from there on."""

    ptr: int
    size: int


_new_tuple = tuple.__new__  # in C, where the class's own call is Python's


@final
class TwoPoolAllocator:
    """Small and large pool over `source`, safe to use from any thread and from finalizers.

    config: None means `AllocatorConfig.from_env()`.
    on_exhausted: called without the lock held, once per request that is about to fail; it may free
        memory of this allocator. The default collects Python garbage, which may hold the last
        reference to arrays.

    events: what `record_stream` needs; None: blocks are reused in the order of their own stream
        only.

    Raises AllocValueError when the source aligns chunks to less than `alignment_size`, and
    OutOfMemoryError when the pre-allocation does not fit.
    """

    _closed = True  # until it is made whole

    def __init__(
        self,
        source: ChunkSource,
        config: AllocatorConfig | None = None,
        *,
        on_exhausted: Callable[[], object] = gc.collect,
        events: StreamEvents | None = None,
    ) -> None:
        check_kind(source, ChunkSource, "source must be a ChunkSource")
        self.config = AllocatorConfig.from_env() if config is None else config
        check_kind(self.config, AllocatorConfig, "config must be an AllocatorConfig")
        self._policy = TwoPoolPolicy(source, self.config)
        self._on_exhausted = on_exhausted
        # Re-entrant, because a finalizer may run in the thread that holds it; `_busy` then tells
        # the two apart.
        self._lock = threading.RLock()
        self._busy = False
        self._live: dict[int, Block] = {}
        self._pending: deque[Block] = deque()
        self._users: dict[int, set[int]] = {}  # pointer -> other streams that use the block
        self._deferred = None if events is None else DeferredFrees(events)
        self._serial = 0
        self._events: list[TraceEvent] | None = None
        self._recorded: set[int] = set()
        self._closed = False

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter exit the process's memory goes as a whole; CUDA may be gone already.
        if not self._closed and not is_exiting():
            self.close()

    def malloc(self, nbytes: int, stream: int = 0) -> Allocation:
        """Hand out at least `nbytes` bytes for work on `stream` (any integer that names it).

        Zero bytes give `Allocation(0, 0)`, which needs no free. Raises AllocTypeError for a size or
        stream that is no integer, AllocValueError for a negative size, OutOfMemoryError with a
        report when nothing fits, ReentrantMallocError when called from a finalizer or hook that
        runs inside this allocator, ClosedError after `close()`.
        """
        if type(nbytes) is not int:
            nbytes = whole_number(nbytes, "malloc takes a number of bytes")
        if type(stream) is not int:
            stream = stream_number(stream)
        if nbytes <= 0:
            if nbytes == 0:
                return Allocation(0, 0)
            raise AllocValueError(f"malloc of {nbytes} bytes; a size must be 0 or more")
        allocation = self._try_malloc(nbytes, stream, False)
        if allocation is not None:
            return allocation
        if self._deferred is not None:
            self._exclusively(lambda: self._reap(everything=True))
            allocation = self._try_malloc(nbytes, stream, False)
        if allocation is None:
            self._on_exhausted()
            allocation = self._last_attempt(nbytes, stream)
        while allocation is None and self._pending:  # what finalizers freed inside that attempt
            allocation = self._last_attempt(nbytes, stream)
        if allocation is None:
            raise OutOfMemoryError(self._exclusively(lambda: self._fail(nbytes, stream)))
        return allocation

    def free(self, ptr: int) -> None:
        """Take an allocation back. Never waits for another thread; safe in finalizers. `free(0)`
        does nothing.

        Raises InvalidFreeError at once, also when the work is queued, for a pointer that is not
        allocated.
        """
        if ptr == 0:
            return
        # Atomic: of two threads that free one pointer, one gets None.
        block = self._live.pop(ptr, None)
        if block is None:
            refuse_free(ptr)
        if not self._lock.acquire(False):
            self._pending.append(block)
            return
        if self._busy:  # in this thread, whose call or the next one does it
            self._pending.append(block)
            self._lock.release()
            return
        self._busy = True
        try:
            if self._users or self._deferred or self._pending:
                self._pending.append(block)
            else:  # `_drain` of one block, written out because every free passes here
                self._give(block)
            if self._pending:
                self._drain()
        finally:
            self._busy = False
            self._lock.release()

    def record_stream(self, ptr: int, stream: int) -> None:
        """Say that work on `stream` uses the allocation at `ptr`, which was made for another: once
        freed, it is reused only after the work that is queued on `stream` by then is done.

        Raises InvalidFreeError for a pointer that is not allocated, AllocTypeError for a stream
        that is no integer, AllocValueError without events.
        """
        if self._deferred is None:
            raise AllocValueError("record_stream needs an allocator that was made with events=")
        stream = stream_number(stream)
        block = self._live.get(ptr)
        if block is None and ptr:  # 0 is of no bytes
            raise InvalidFreeError(f"record_stream of {ptr:#x}, which is not allocated here")
        if block is not None and stream != block.stream:
            self._users.setdefault(block.serial, set()).add(stream)

    def release_idle(
        self, *, include_pre_allocated: bool = False, stream: int | None = None
    ) -> int:
        """Give chunks without a byte in use back to the source; returns the bytes given back.

        Pre-allocated chunks stay unless asked for. With `stream`, only chunks that no other stream
        has used are given back.
        """
        return self._exclusively(
            lambda: self._policy.release_idle(
                include_pre_allocated=include_pre_allocated, stream=stream
            )
        )

    def close(self) -> None:
        """Give idle chunks back now, others once their last block is freed; refuse `malloc`."""

        def close() -> None:
            self._closed = True
            self._reap(wait=True)
            self._policy.release_idle(include_pre_allocated=True)

        self._exclusively(close)

    def stats(self) -> Stats:
        """The counters now, with queued frees done."""
        return self._exclusively(self._policy.stats)

    def reset_peaks(self) -> None:
        """Let every peak start again from its present value."""
        self._exclusively(self._policy.reset_peaks)

    def snapshot(self) -> Snapshot:
        """Every chunk and block and the free lists as they stand, with queued frees done."""
        return self._exclusively(
            lambda: take_snapshot(self._policy.pools, self.config.alignment_size)
        )

    @property
    def limit_bytes(self) -> int:
        """Hard limit on the bytes held from the source; 0 is none."""
        return self._policy.limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Set the hard limit (0: none). A limit below what is held stops growth; it takes nothing
        away.

        Raises AllocValueError for a negative limit.
        """
        check_limit(limit_bytes)
        self._policy.limit_bytes = limit_bytes

    def start_recording(self) -> None:
        """Start a trace afresh; what is live now becomes its first events, so that the trace
        replays by itself.
        """

        def start() -> None:
            self._events = []
            self._recorded = set()
            for block in sorted(self._live.copy().values(), key=lambda block: block.serial):
                self._record_alloc(block)

        self._exclusively(start)

    def mark(self, name: str) -> None:
        """Put a name (TraceError: no text) into the trace that is recorded, as that of a step."""
        mark = TraceEvent(action="mark", note=name)

        def note() -> None:
            if self._events is not None:
                self._events.append(mark)

        self._exclusively(note)

    def stop_recording(self) -> list[TraceEvent]:
        """End the trace and return its events; empty when none was started."""

        def stop() -> list[TraceEvent]:
            events, self._events = self._events, None
            return events if events is not None else []

        return self._exclusively(stop)

    def follow(self, plan: LifetimePlan | None) -> None:
        """Place requests as `plan` says where they come as it has them; None: no longer.

        Its range of memory is taken now. Call `begin_step` where the recorded step began. Raises
        AllocValueError while blocks of the plan before are in use, or for another alignment, and
        OutOfMemoryError, following none, when there is no room.
        """

        def follow() -> None:
            has_room = self._policy.follow(plan)
            while not has_room and self._pending:  # what finalizers freed meanwhile
                self._drain()
                has_room = self._policy.follow(plan)
            if not has_room and plan is not None:
                policy, waiting = self._policy, self._waiting_bytes()
                raise OutOfMemoryError(
                    policy.report(plan.size_bytes, 0, pool=policy.large, waiting_bytes=waiting)
                )

        self._exclusively(follow)

    def begin_step(self) -> None:
        """Say that the program is where the step that was planned began."""
        self._exclusively(self._policy.begin_step)

    def plan_use(self) -> PlanUse:
        """How many requests went where the plan that is followed said, and how many elsewhere."""
        counted = self._policy.num_planned, self._policy.num_unplanned
        return PlanUse(self._policy.large.planned is not None, *counted)

    def _exclusively(self, action: Callable[[], _T]) -> _T:
        with self._lock:
            if self._busy:
                refuse_reentry()
            self._busy = True
            try:
                self._drain()
                return action()
            finally:
                self._busy = False

    def _try_malloc(self, requested: int, stream: int, last_resort: bool) -> Allocation | None:
        """`_exclusively`, written out because every request passes here."""
        with self._lock:
            if self._busy:
                refuse_reentry()
            self._busy = True
            try:
                if self._closed:
                    raise ClosedError(
                        f"malloc of {requested} bytes after close(); make a new allocator"
                    )
                if self._pending or self._deferred:
                    self._drain()
                block = self._policy.take(requested, stream, last_resort)
                if block is None:
                    return None
                self._serial = block.serial = self._serial + 1
                if self._events is not None:
                    self._record_alloc(block)
                ptr = block.ptr
                self._live[ptr] = block
                return _new_tuple(Allocation, (ptr, block.size))
            finally:
                self._busy = False

    def _last_attempt(self, requested: int, stream: int) -> Allocation | None:
        if self._deferred is not None:
            self._exclusively(lambda: self._reap(wait=True))
        return self._try_malloc(requested, stream, True)

    def _fail(self, requested: int, stream: int) -> OomReport:
        """The report of a request that found no room. In a trace it is taken and given back at
        once, so that a replay makes the request too.
        """
        if self._events is not None:
            self._serial += 1
            taken = TraceEvent(
                action="alloc", block_id=self._serial, size_bytes=requested, stream=stream
            )
            self._events += [taken, replace(taken, action="free", size_bytes=0)]
        return self._policy.report(requested, stream, waiting_bytes=self._waiting_bytes())

    def _waiting_bytes(self) -> int:
        return self._deferred.waiting_bytes if self._deferred else 0

    def _drain(self) -> None:
        pending = self._pending
        while True:
            while pending:
                block = pending.popleft()
                users = self._users.pop(block.serial, None) if self._users else None
                if users and self._deferred is not None:
                    self._deferred.add(block, frozenset(users))
                else:
                    self._give(block)
            if self._deferred:
                self._reap()
            if not pending:  # else a finalizer freed more while a chunk was given back
                return

    def _reap(self, *, everything: bool = False, wait: bool = False) -> None:
        """Take back deferred blocks whose events are done."""
        if self._deferred is not None:
            for block in self._deferred.done(everything=everything, wait=wait):
                self._give(block)

    def _give(self, block: Block) -> None:
        if self._events is not None and block.serial in self._recorded:
            self._recorded.remove(block.serial)
            self._events.append(TraceEvent(action="free", block_id=block.serial, size_bytes=0))
        self._policy.give(block, self._closed)

    def _record_alloc(self, block: Block) -> None:
        if self._events is not None:
            self._recorded.add(block.serial)
            self._events.append(
                TraceEvent(
                    action="alloc",
                    block_id=block.serial,
                    size_bytes=block.requested,
                    stream=block.stream or 0,
                    chunk=block.chunk.number,
                    offset_bytes=block.ptr - block.chunk.ptr,
                )
            )

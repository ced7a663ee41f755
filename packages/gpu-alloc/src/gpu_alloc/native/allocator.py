"""`TwoPoolAllocator` with the compiled policy: same methods, same decisions, same errors.

Tests run both side by side, address by address. What differs is speed, and that the compiled part
also serves callers without Python (`gpu_alloc.torch`).

Invariant: no two live allocations overlap, and a pointer is freed exactly once.

Length: one method for each of `TwoPoolAllocator`, and the ways around Python's calls.

    allocator = NativeAllocator(HostSource(), AllocatorConfig())
    ptr, size = allocator.malloc(1000)
    allocator.free(ptr)
"""

import ctypes
import gc
import weakref
from array import array
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, Self, final

from gpu_alloc.core import (
    MIB,
    Allocation,
    AllocatorConfig,
    OomReport,
    OutOfMemoryError,
    PoolStats,
    Snapshot,
    Stats,
)
from gpu_alloc.errors import (
    AllocValueError,
    ClosedError,
    InvalidFreeError,
    check_kind,
    check_limit,
    refuse_free,
    stream_number,
    whole_number,
)
from gpu_alloc.events import TraceEvent
from gpu_alloc.native.binding import (
    CLOSED,
    NO_MEMORY,
    Core,
    functions_of,
    native_library,
    settings_of,
)
from gpu_alloc.native.callbacks import NOTHING_KEPT, Callbacks
from gpu_alloc.plan import LifetimePlan, PlanUse, check_in_use, check_plan
from gpu_alloc.sources import ChunkSource, StreamEvents, check_alignment, round_up

_NEW_TUPLE = tuple.__new__
_MOST_BYTES = 1 << 60  # beyond any device, so that sums of sizes stay whole numbers of C
_POOL_FIELDS = (
    "allocated_bytes",
    "allocated_peak_bytes",
    "requested_bytes",
    "requested_peak_bytes",
    "reserved_bytes",
    "reserved_peak_bytes",
    "largest_free_bytes",
    "num_live_blocks",
    "num_free_blocks",
    "num_chunks",
)


class Totals(NamedTuple):
    """Counters that only rise. num_retries: requests that the first attempt had no room for."""

    num_mallocs: int
    num_frees: int
    malloced_bytes: int
    freed_bytes: int
    num_retries: int
    num_ooms: int


@final
class NativeAllocator:
    """See `TwoPoolAllocator`, whose arguments and methods these are.

    Raises NativeUnavailableError where the core is not compiled and cannot be.
    """

    def __init__(
        self,
        source: ChunkSource,
        config: AllocatorConfig | None = None,
        *,
        on_exhausted: Callable[[], object] = gc.collect,
        events: StreamEvents | None = None,
    ) -> None:
        check_kind(source, ChunkSource, "source must be a ChunkSource")
        config = AllocatorConfig.from_env() if config is None else config
        check_kind(config, AllocatorConfig, "config must be an AllocatorConfig")
        check_alignment(config.alignment_size, source)
        config.check_source(source)
        callbacks = Callbacks(source, events)
        self._callbacks: Callbacks | None = callbacks
        settings = settings_of(config, granularity_bytes=source.granularity_bytes)
        functions = functions_of(callbacks.pointers)
        self._has_events = events is not None
        self._open(config, settings, functions, on_exhausted, source.granularity_bytes)

    @classmethod
    def on_invented_addresses(
        cls, config: AllocatorConfig, *, capacity_bytes: int | None, granularity_bytes: int
    ) -> Self:
        """An allocator that places what an `AddressSource` of that capacity would hold, without
        Python in its way.
        """
        self = cls.__new__(cls)
        self._callbacks = None
        self._has_events = False
        settings = settings_of(
            config, granularity_bytes=granularity_bytes, capacity_bytes=capacity_bytes
        )
        self._open(config, settings, functions_of(()), _nothing, granularity_bytes)
        return self

    def _open(
        self,
        config: AllocatorConfig,
        settings: Any,
        functions: Any,
        on_exhausted: Callable[[], object],
        granularity_bytes: int,
    ) -> None:
        library = native_library()
        handle = library.waiting.ga_open(settings, functions)
        self._bind(config, Core(library, handle, is_owned=True))
        self._on_exhausted = on_exhausted
        weakref.finalize(self, _end, self._core, self._callbacks).atexit = False
        failed = self._call("ga_pre_allocate")
        if failed:
            mb = config.small_pool_pre_alloc_in_mb, config.large_pool_pre_alloc_in_mb
            size = round_up(mb[failed - 1] * MIB, granularity_bytes)
            report = self._report(size, 0, pool=("small", "large")[failed - 1])
            self.release_idle(include_pre_allocated=True)
            raise OutOfMemoryError(report)

    @classmethod
    def of_core(cls, config: AllocatorConfig, core: Core) -> Self:
        """The methods of an allocator for a core that somebody else opened with `config`, with
        events, and keeps.
        """
        self = cls.__new__(cls)
        self._callbacks = None
        self._has_events = True
        self._bind(config, core)
        self._on_exhausted = gc.collect
        return self

    def _bind(self, config: AllocatorConfig, core: Core) -> None:
        self.config = config
        self._align_mask = config.alignment_size - 1
        self._padded = ~self._align_mask
        self.kept = NOTHING_KEPT if self._callbacks is None else self._callbacks.kept
        self._marks: dict[int, TraceEvent] = {}
        self._mark_numbers = count()
        self._core = core
        # For callers that must be quick. try_malloc(nbytes, stream): the address of a block that
        # needs neither the source nor a wait; otherwise 0 or less, and `malloc` is to be asked.
        # try_free(ptr): as `free`, if it returns 0 and `kept.any` is false; see `raise_of_free`.
        self.try_malloc = core.library.fastest("try_malloc", core.handle)
        self.try_free = core.library.fastest("free", core.handle)
        if config.free_idle_chunk:  # it may call the source, which may wait for the device
            self.try_free = self._free_waiting

    def malloc(self, nbytes: int, stream: int = 0) -> Allocation:
        """See `TwoPoolAllocator.malloc`."""
        if type(nbytes) is int:
            ptr = self.try_malloc(nbytes, stream)
            if ptr > 0:
                return _NEW_TUPLE(Allocation, (ptr, nbytes + self._align_mask & self._padded))
        return self._malloc_slowly(nbytes, stream)

    def free(self, ptr: int) -> None:
        """See `TwoPoolAllocator.free`."""
        refused = self.try_free(ptr)
        if refused or self.kept.any:
            self.raise_of_free(ptr, refused)

    def raise_of_free(self, ptr: int, refused: int) -> None:
        """Raise what `free` has to: `try_free` returned `refused`, or a callback raised."""
        if refused:
            self._refuse_free(ptr)
        self._raise_kept()

    def record_stream(self, ptr: int, stream: int) -> None:
        """See `TwoPoolAllocator.record_stream`."""
        if not self._has_events:
            raise AllocValueError("record_stream needs an allocator that was made with events=")
        name = stream_number(stream)
        if ptr and self._call("ga_record_stream", ptr, name):
            raise InvalidFreeError(f"record_stream of {ptr:#x}, which is not allocated here")

    def release_idle(
        self, *, include_pre_allocated: bool = False, stream: int | None = None
    ) -> int:
        """See `TwoPoolAllocator.release_idle`."""
        of_stream = (0, 0) if stream is None else (1, stream_number(stream))
        return self._call("ga_release_idle", include_pre_allocated, *of_stream)

    def close(self) -> None:
        """See `TwoPoolAllocator.close`."""
        self._call("ga_close")

    def stats(self) -> Stats:
        """See `TwoPoolAllocator.stats`."""
        return _stats(self._numbers())

    def reset_peaks(self) -> None:
        """See `TwoPoolAllocator.reset_peaks`."""
        self._call("ga_reset_peaks")

    def snapshot(self) -> Snapshot:
        """See `TwoPoolAllocator.snapshot`."""
        return Snapshot.from_numbers(self.config.alignment_size, self._rows("ga_snapshot"))

    @property
    def limit_bytes(self) -> int:
        """See `TwoPoolAllocator.limit_bytes`."""
        return self._call("ga_limit")

    def set_limit(self, limit_bytes: int) -> None:
        """See `TwoPoolAllocator.set_limit`."""
        check_limit(limit_bytes)
        self._call("ga_set_limit", min(limit_bytes, _MOST_BYTES))

    def start_recording(self) -> None:
        """See `TwoPoolAllocator.start_recording`."""
        self._marks = {}
        self._call("ga_start_recording")

    def mark(self, name: str) -> None:
        """See `TwoPoolAllocator.mark`."""
        number = next(self._mark_numbers)
        self._marks[number] = TraceEvent(action="mark", note=name)
        if not self._call("ga_mark", number):
            self._marks.pop(number, None)

    def stop_recording(self) -> list[TraceEvent]:
        """See `TwoPoolAllocator.stop_recording`."""
        numbers = self._rows("ga_stop_recording")
        rows = zip(*[iter(numbers)] * 6, strict=True)
        return [self._event(*row) for row in rows]

    def follow(self, plan: LifetimePlan | None) -> None:
        """See `TwoPoolAllocator.follow`."""
        check_plan(plan, self.config.alignment_size)
        found = self._core.follow(plan)
        self._raise_kept()
        if found == NO_MEMORY and plan is not None:
            raise OutOfMemoryError(self._report(plan.size_bytes, 0, pool="large"))
        check_in_use(found)

    def begin_step(self) -> None:
        """See `TwoPoolAllocator.begin_step`."""
        self._call("ga_begin_step")

    def plan_use(self) -> PlanUse:
        """See `TwoPoolAllocator.plan_use`."""
        use = self._core.plan_use()
        self._raise_kept()
        return use

    def run(self, rows: "array[int]", ptrs: "ctypes.Array[ctypes.c_int64]") -> int:
        """Do what `rows` say, four numbers each: 0 for a malloc, 1 for a free and 2 for a step that
        begins, the number of the block from 0, bytes, stream; `ptrs` keeps the blocks' addresses.
        Returns the index of the row that ran out of memory, or how many rows there are.
        """
        num_rows = len(rows) // 4
        kind = ctypes.c_int64 * max(len(rows), 1)
        given = kind.from_buffer(rows) if len(rows) else kind()
        return self._call("ga_run", given, num_rows, ptrs)  # type: ignore[arg-type]

    def totals(self) -> Totals:
        """What was counted since the core was made."""
        return Totals(*self._numbers()[24:30])

    def last_report(self) -> OomReport | None:
        """Of the request that failed last, as it was then; None when none has failed."""
        numbers = self._rows("ga_last_failure")
        if not numbers:
            return None
        requested, stream, limit_bytes, *rest = numbers
        return self._report(requested, stream, rest, limit_bytes)

    def _call(self, name: str, *arguments: int) -> int:
        result = self._core.call(name, *arguments)
        try:
            self._raise_kept()
        except BaseException:
            if name == "ga_malloc" and result > 0:  # nobody will know of this block
                self._core.call("ga_free", result)
            raise
        return result

    def _numbers(self) -> list[int]:
        numbers = self._core.stats(0)
        self._raise_kept()
        return numbers

    def _rows(self, name: str) -> list[int]:
        rows = self._core.rows(name)
        self._raise_kept()
        return rows

    def _raise_kept(self) -> None:
        if self.kept.any:
            self.kept.raise_kept()

    def _refuse_free(self, ptr: int) -> None:
        if ptr != 0:
            refuse_free(ptr)

    def _free_waiting(self, ptr: int) -> int:
        try:
            return int(self._core.library.waiting.ga_free(self._core.handle, ptr))
        except ctypes.ArgumentError:
            return -1

    def _malloc_slowly(self, nbytes: int, stream: int) -> Allocation:
        requested = whole_number(nbytes, "malloc takes a number of bytes")
        name = stream_number(stream)
        if requested <= 0:
            if requested == 0:
                return Allocation(0, 0)
            raise AllocValueError(f"malloc of {requested} bytes; a size must be 0 or more")
        # What no device has is refused as what this one lacks, by the size nearest to it.
        asked = min(requested, _MOST_BYTES)
        ptr = self._call("ga_malloc", asked, name, 0)
        if ptr == 0:
            self._on_exhausted()
            ptr = self._call("ga_malloc", asked, name, 1)
        if ptr == CLOSED:
            raise ClosedError(f"malloc of {requested} bytes after close(); make a new allocator")
        if ptr == 0:
            raise OutOfMemoryError(self._report(requested, name))
        return Allocation(ptr, (requested + self._align_mask) & ~self._align_mask)

    def _report(
        self,
        requested: int,
        stream: int,
        numbers: list[int] | None = None,
        limit_bytes: int | None = None,
        *,
        pool: str | None = None,
    ) -> OomReport:
        numbers = self._core.stats(stream) if numbers is None else numbers
        padded = (requested + self._align_mask) & ~self._align_mask
        is_small = padded <= self.config.small_pool_size_in_mb * MIB
        waiting_bytes, usable_bytes, largest_usable_bytes = numbers[-3:]
        return OomReport(
            requested_bytes=requested,
            padded_bytes=padded,
            pool=pool or ("small" if is_small else "large"),
            stream=stream,
            stats=_stats(numbers),
            limit_bytes=self.limit_bytes if limit_bytes is None else limit_bytes,
            waiting_bytes=waiting_bytes,
            usable_bytes=usable_bytes,
            largest_usable_bytes=largest_usable_bytes,
        )

    def _event(
        self, action: int, number: int, size: int, stream: int, chunk: int, offset: int
    ) -> TraceEvent:
        if action == 2:
            return self._marks[number]
        if action == 1:
            return TraceEvent(action="free", block_id=number, stream=stream)
        return TraceEvent(
            action="alloc",
            block_id=number,
            size_bytes=size,
            stream=stream,
            chunk=chunk,
            offset_bytes=offset,
        )


def _stats(numbers: list[int]) -> Stats:
    width = len(_POOL_FIELDS)
    pools = [numbers[:width], numbers[width : 2 * width]]
    small, large = (PoolStats(**dict(zip(_POOL_FIELDS, pool, strict=True))) for pool in pools)
    return Stats(
        small=small,
        large=large,
        allocated_peak_bytes=numbers[20],
        requested_peak_bytes=numbers[21],
        reserved_peak_bytes=numbers[22],
        num_source_calls=numbers[23],
    )


def _end(core: Core, callbacks: Callbacks | None) -> None:
    """Give what nobody uses back to the source, and the rest with its last block. The finalizers of
    what is garbage together with the allocator run later, and may free blocks.

    Raises what the source raised.
    """
    core.call("ga_close")
    if callbacks is not None:
        callbacks.kept.raise_kept()


def _nothing() -> None:
    """What lives on invented addresses is not garbage."""

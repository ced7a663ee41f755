"""A trace read once, as plain numbers, to be run under many settings.

Runs on the compiled core where there is one, which decides as the Python core does, and on that
otherwise.

Invariant: the requests contradict each other nowhere, so that a run ends at its end or without
memory.
"""

import ctypes
from array import array
from collections.abc import Container, Iterable
from typing import final

from gpu_alloc.core import AllocatorConfig, OomReport, OutOfMemoryError, Stats, TwoPoolAllocator
from gpu_alloc.errors import TraceError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.native import NativeAllocator, is_compiled
from gpu_alloc.plan import END_OF_STEP, LifetimePlan, is_step_mark
from gpu_alloc.sources import AddressSource, PagedAddressSource

GRANULARITY_BYTES = 2 << 20
_MOST = 1 << 60  # beyond which a size or a stream is left to Python's integers


@final
class Requests:
    """The requests of a trace. Raises TraceError naming the event for a block that is allocated
    twice or freed without being allocated.

    plan: what runs follow, if anything: from the end of the step that it was made of, or from the
    start of another trace. peak_live_bytes: most bytes requested and not yet freed at
    a time.
    """

    def __init__(self, trace: Iterable[TraceEvent], plan: LifetimePlan | None = None) -> None:
        check_kind(trace, Iterable, "trace must be a sequence of TraceEvents")
        # 0, 1, 2 for a malloc, a free, a step that begins; number of the block, size, stream
        self._rows: list[int] = []
        self._plan = plan
        self._follow_at = 0  # the row before which the plan is first followed
        self._indices: list[int] = []  # of the row's event in the trace
        self.num_events = 0
        self.num_blocks = 0
        self.peak_live_bytes = 0
        live: dict[int, tuple[int, int]] = {}
        live_bytes = 0
        for event in trace:
            check_request(event, self.num_events, live)
            if event.action == "alloc":
                live[event.block_id] = self.num_blocks, event.size_bytes
                live_bytes += event.size_bytes
                self._rows += 0, self.num_blocks, event.size_bytes, event.stream
                self.num_blocks += 1
                self.peak_live_bytes = max(self.peak_live_bytes, live_bytes)
            elif event.action == "free":
                block, size_bytes = live.pop(event.block_id)
                live_bytes -= size_bytes
                self._rows += 1, block, 0, 0
            is_step = plan is not None and is_step_mark(event, plan.step)
            if is_step:
                self._rows += 2, 0, 0, 0
            elif plan is not None and event.note == END_OF_STEP + plan.step:
                self._follow_at = len(self._indices)
            if event.action != "mark" or is_step:
                self._indices.append(self.num_events)
            self.num_events += 1
        self._is_small = all(abs(number) < _MOST for number in self._rows)
        self._numbers = array("q", self._rows) if self._is_small else None

    def run(
        self, config: AllocatorConfig, capacity_bytes: int | None
    ) -> tuple[int, OomReport | None, Stats]:
        """Run on so many bytes of invented addresses: how many events were done, the report of the
        one that found no memory, and the counters at the end.
        """
        source: AddressSource | PagedAddressSource
        if config.use_virtual_memory:
            source = PagedAddressSource(capacity_bytes)
        else:
            source = AddressSource(capacity_bytes, granularity_bytes=GRANULARITY_BYTES)
        try:
            if self._numbers is not None and is_compiled():
                return self._run_compiled(self._numbers, config, source)
            return self._run_in_python(config, source)
        except OutOfMemoryError as error:  # of the pre-allocation or the plan
            return 0, error.report, error.report.stats

    def _run_compiled(
        self,
        numbers: "array[int]",
        config: AllocatorConfig,
        source: AddressSource | PagedAddressSource,
    ) -> tuple[int, OomReport | None, Stats]:
        allocator = NativeAllocator.on_invented_addresses(
            config,
            capacity_bytes=source.capacity_bytes,
            granularity_bytes=source.granularity_bytes,
        )
        ptrs = (ctypes.c_int64 * max(self.num_blocks, 1))()
        parts = [numbers]
        if self._plan is not None:
            first = 4 * self._follow_at
            parts = [numbers[:first], numbers[first:]]
        done = allocator.run(parts[0], ptrs)
        if self._plan is not None and done == self._follow_at:
            allocator.follow(self._plan)
            done += allocator.run(parts[1], ptrs)
        report = allocator.last_report() if done < len(self._indices) else None
        return self._num_done(done), report, allocator.stats()

    def _run_in_python(
        self, config: AllocatorConfig, source: AddressSource | PagedAddressSource
    ) -> tuple[int, OomReport | None, Stats]:
        allocator = TwoPoolAllocator(source, config, on_exhausted=nothing_to_reclaim)
        ptrs = [0] * self.num_blocks
        rows = zip(*[iter(self._rows)] * 4, strict=True)
        for done, (action, block, size, stream) in enumerate(rows):
            if self._plan is not None and done == self._follow_at:
                allocator.follow(self._plan)
            if action:
                allocator.free(ptrs[block]) if action == 1 else allocator.begin_step()
                continue
            try:
                ptrs[block] = allocator.malloc(size, stream).ptr
            except OutOfMemoryError as error:
                return self._num_done(done), error.report, allocator.stats()
        return self.num_events, None, allocator.stats()

    def _num_done(self, rows: int) -> int:
        return self._indices[rows] if rows < len(self._indices) else self.num_events


def check_request(event: TraceEvent, index: int, live: Container[int]) -> None:
    """Raise TraceError naming the event for one that contradicts those before it."""
    check_kind(event, TraceEvent, "a trace holds TraceEvents")
    if event.action == "alloc" and event.block_id in live:
        raise TraceError(
            f"event {index} allocates block {event.block_id}, which is live; give it another "
            "block_id"
        )
    if event.action == "free" and event.block_id not in live:
        raise TraceError(
            f"event {index} frees block {event.block_id}, which is not live; record its alloc first"
        )


def nothing_to_reclaim() -> None:
    """Replayed blocks belong to the trace, so collecting garbage could free none."""

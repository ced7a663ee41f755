"""record_stream: blocks that another stream uses come back when its events are done."""

import random

import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    AllocError,
    InvalidFreeError,
    OutOfMemoryError,
    TwoPoolAllocator,
    check_snapshot,
    replay,
)
from gpu_alloc.errors import AllocTypeError
from gpu_alloc.sources import StreamEvents

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("each_core")


class PretendedEvents(StreamEvents):
    """Each stream has done the work up to the number in `finished`."""

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.capturing: set[int] = set()
        self.waits = 0

    def record(self, stream: int) -> tuple[int, int]:
        assert not self.capturing
        self.queued[stream] = self.queued.get(stream, 0) + 1
        return stream, self.queued[stream]

    def is_done(self, event: tuple[int, int]) -> bool:
        assert not self.capturing
        return self.finished.get(event[0], 0) >= event[1]

    def wait(self, event: tuple[int, int]) -> None:
        assert not self.capturing
        self.waits += not self.is_done(event)
        self.finished[event[0]] = max(self.finished.get(event[0], 0), event[1])

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing


def _allocator(capacity_mb: int, **config: int) -> tuple[TwoPoolAllocator, PretendedEvents]:
    events = PretendedEvents()
    source = AddressSource(capacity_mb * MIB)
    allocator = TwoPoolAllocator(
        source,
        AllocatorConfig(**config),
        events=events,
        on_exhausted=lambda: None,  # garbage of the whole test run is large, and none is ours
    )
    return allocator, events


def test_a_block_is_reused_only_when_the_other_streams_work_is_done() -> None:
    allocator, events = _allocator(16)
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.record_stream(block.ptr, 3)
    allocator.free(block.ptr)
    events.finished[2] = 1
    other = allocator.malloc(4 * MIB, stream=1)
    assert other.ptr != block.ptr, "stream 3 is not done"
    events.finished[3] = 1
    assert allocator.malloc(4 * MIB, stream=1).ptr == block.ptr
    assert events.waits == 0


def test_a_block_used_on_its_own_stream_is_reused_at_once() -> None:
    allocator, events = _allocator(16)
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.record_stream(block.ptr, 1)
    allocator.free(block.ptr)
    assert allocator.malloc(4 * MIB, stream=1).ptr == block.ptr
    assert events.queued == {}


def test_on_shortage_done_events_are_found_behind_others_and_then_all_are_waited_for() -> None:
    allocator, events = _allocator(8)
    blocks = [allocator.malloc(4 * MIB, stream=1) for _ in range(2)]
    for block, stream in zip(blocks, (2, 3), strict=True):
        allocator.record_stream(block.ptr, stream)
        allocator.free(block.ptr)
    events.finished[3] = 1
    assert allocator.malloc(4 * MIB, stream=1).ptr == blocks[1].ptr
    assert events.waits == 0, "nothing was waited for while something done would do"
    assert allocator.malloc(4 * MIB, stream=1).ptr == blocks[0].ptr
    assert events.waits == 1
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(4 * MIB, stream=1)


def test_no_event_is_recorded_or_asked_while_a_graph_is_captured() -> None:
    allocator, events = _allocator(8)
    block = allocator.malloc(8 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.free(block.ptr)
    events.capturing = {2}
    fresh = allocator.malloc
    with pytest.raises(OutOfMemoryError, match="while a graph is captured") as caught:
        fresh(4 * MIB, stream=1)
    assert caught.value.report.waiting_bytes == 8 * MIB
    events.capturing = set()
    assert allocator.malloc(8 * MIB, stream=1).ptr == block.ptr


def test_close_waits_for_what_is_in_use_elsewhere() -> None:
    source, events = AddressSource(), PretendedEvents()
    allocator = TwoPoolAllocator(source, AllocatorConfig(), events=events)
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.free(block.ptr)
    allocator.close()
    assert (source.used_bytes, events.waits) == (0, 1)


def test_a_trace_frees_a_block_when_it_can_be_used_again() -> None:
    allocator, events = _allocator(64)
    allocator.start_recording()
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.free(block.ptr)
    allocator.malloc(4 * MIB, stream=1)
    events.finished[2] = 1
    allocator.malloc(4 * MIB, stream=1)
    trace = allocator.stop_recording()
    assert [event.action for event in trace] == ["alloc", "alloc", "free", "alloc"]
    assert replay(trace, AllocatorConfig()).peak_live_bytes == 8 * MIB


def test_a_trace_has_nothing_of_a_block_that_was_freed_before_it_and_waits() -> None:
    allocator, events = _allocator(64)
    allocator.start_recording()
    block = allocator.malloc(4 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.free(block.ptr)
    allocator.start_recording()
    events.finished[2] = 1
    allocator.malloc(4 * MIB, stream=1)
    assert [event.action for event in allocator.stop_recording()] == ["alloc"]


def test_a_wait_that_is_broken_off_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, events = _allocator(8)
    block = allocator.malloc(8 * MIB, stream=1)
    allocator.record_stream(block.ptr, 2)
    allocator.free(block.ptr)

    def interrupted(event: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(events, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            allocator.malloc(8 * MIB, stream=1)
    again = allocator.malloc(8 * MIB, stream=1)
    assert again.ptr == block.ptr
    allocator.free(again.ptr)
    assert allocator.stats().allocated_bytes == 0


def test_no_bytes_are_in_use_on_no_stream() -> None:
    allocator, _ = _allocator(8)
    allocator.record_stream(allocator.malloc(0).ptr, 2)


class Number:
    """What only counts as an integer, as a number of numpy does."""

    def __index__(self) -> int:
        return 2


def test_wrong_calls_are_refused() -> None:
    allocator, _ = _allocator(64)
    ptr = allocator.malloc(8, 1).ptr
    for stream in (None, "side", 1.5):
        with pytest.raises(AllocTypeError, match="a stream is named by a whole number, got"):
            allocator.record_stream(ptr, stream)  # type: ignore[arg-type]
    for number in (2, Number()):
        allocator.record_stream(ptr, number)  # type: ignore[arg-type]
    allocator.free(ptr)
    assert allocator.malloc(8, 1).size == 512
    with pytest.raises(InvalidFreeError, match="not allocated here"):
        allocator.record_stream(123, 1)
    plain = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    with pytest.raises(AllocError, match="events="):
        plain.record_stream(plain.malloc(8).ptr, 1)


def test_random_use_on_several_streams_never_shares_a_block_that_is_in_use() -> None:
    """The model knows up to which event which stream uses which addresses."""
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    allocator, events = _allocator(24, large_pool_pre_alloc_in_mb=20)
    live: dict[int, tuple[int, int, set[int]]] = {}  # address -> size, own stream, others
    busy: list[tuple[int, int, dict[int, int]]] = []  # address, size, event of each other stream
    reused = 0
    for step in range(500):
        action = rng.random()
        if action < 0.45:
            size, stream = int(10 ** rng.uniform(3, 6.8)), rng.randrange(3)
            try:
                ptr, given = allocator.malloc(size, stream)
            except OutOfMemoryError:
                continue
            for at, length, needed in busy:
                if at < ptr + given and ptr < at + length:
                    reused += 1
                    late = [s for s, n in needed.items() if events.finished.get(s, 0) < n]
                    assert not late, f"seed {seed}, step {step}: streams {late} still use it"
            live[ptr] = (given, stream, set())
        elif live and action < 0.6:
            ptr, stream = rng.choice(list(live)), rng.randrange(3)
            allocator.record_stream(ptr, stream)
            if stream != live[ptr][1]:
                live[ptr][2].add(stream)
        elif live and action < 0.9:
            ptr = rng.choice(list(live))
            given, _, users = live.pop(ptr)
            allocator.free(ptr)
            busy.append((ptr, given, {stream: events.queued[stream] for stream in users}))
        else:
            stream = rng.randrange(3)
            events.finished[stream] = events.queued.get(stream, 0)
        if step % 20 == 0:
            assert check_snapshot(allocator.snapshot()) == [], f"seed {seed}, step {step}"
    assert reused > 10, f"seed {seed}"

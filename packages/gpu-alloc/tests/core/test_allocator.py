"""Threads, finalizers and re-entrant calls; where memory is placed is test_policy's matter."""

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    AllocError,
    ChunkSource,
    HostSource,
    InvalidFreeError,
    OutOfMemoryError,
    TwoPoolAllocator,
    check_snapshot,
    replay,
)
from gpu_alloc.errors import AllocTypeError, TraceError

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("each_core")


class CallingSource(ChunkSource):
    """An address source that runs a callback inside `acquire`, as a finalizer or hook would run."""

    def __init__(self) -> None:
        self.inner = AddressSource()
        self.alignment_bytes = self.inner.alignment_bytes
        self.granularity_bytes = self.inner.granularity_bytes
        self.callback: Callable[[], object] | None = None

    def acquire(self, size_bytes: int) -> int | None:
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()
        return self.inner.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        self.inner.release(ptr, size_bytes)


class LateSource(CallingSource):
    """Runs its callback in the `late`-th call of `acquire` only; the device has 8 MiB."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.inner = AddressSource(8 * MIB)
        self.late, self.num_calls = late, 0

    def acquire(self, size_bytes: int) -> int | None:
        self.num_calls += 1
        if self.num_calls == self.late:
            return super().acquire(size_bytes)
        return self.inner.acquire(size_bytes)


def test_what_a_finalizer_frees_inside_the_last_attempt_is_used() -> None:
    source = LateSource(0)
    allocator = TwoPoolAllocator(source, AllocatorConfig(), on_exhausted=lambda: None)
    allocator.malloc(8 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(8 * MIB)
    for late in range(2, source.num_calls + 1):  # whichever call of the source it is
        source_of_late = LateSource(late)
        other = TwoPoolAllocator(source_of_late, AllocatorConfig(), on_exhausted=lambda: None)
        held = other.malloc(8 * MIB)
        source_of_late.callback = lambda a=other, ptr=held.ptr: a.free(ptr)
        assert other.malloc(8 * MIB).ptr, late


def test_zero_bytes_need_no_memory_and_no_free() -> None:
    allocator = TwoPoolAllocator(AddressSource(0), AllocatorConfig())
    allocation = allocator.malloc(0)
    assert allocation == (0, 0)
    allocator.free(allocation.ptr)
    assert allocator.stats().num_source_calls == 0


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (1.5, TypeError), ("8", TypeError), (None, TypeError)]
)
def test_wrong_sizes_are_refused(nbytes: int, error: type[Exception]) -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    with pytest.raises(error):
        allocator.malloc(nbytes)


@pytest.mark.parametrize("stream", [None, "side", 1.5])
def test_a_stream_that_is_no_integer_is_refused(stream: object) -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    with pytest.raises(AllocTypeError, match="a stream is named by a whole number, got"):
        allocator.malloc(8, stream)  # type: ignore[arg-type]
    assert allocator.stats().reserved_bytes == 0


def test_what_counts_as_an_integer_names_a_stream_in_a_trace_too() -> None:
    class Three:
        def __index__(self) -> int:
            return 3

    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    allocator.start_recording()
    allocator.malloc(8, Three())  # type: ignore[arg-type]
    assert [event.stream for event in allocator.stop_recording()] == [3]
    assert allocator.release_idle(stream=Three()) == 0  # type: ignore[arg-type]


def test_a_mark_that_is_no_text_is_refused_at_once_and_the_trace_goes_on() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    allocator.mark("before the recording")
    allocator.start_recording()
    allocator.malloc(8)
    with pytest.raises(TraceError, match="note=3 is a int"):
        allocator.mark(3)  # type: ignore[arg-type]
    allocator.mark("step 1")
    events = allocator.stop_recording()
    assert [(e.action, e.note) for e in events] == [("alloc", ""), ("mark", "step 1")]


def test_double_and_foreign_frees_are_refused_and_change_nothing() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    first, second = allocator.malloc(1000), allocator.malloc(1000)
    allocator.free(first.ptr)
    for ptr in (first.ptr, second.ptr + 512, 123):
        with pytest.raises(InvalidFreeError, match=f"{ptr:#x}"):
            allocator.free(ptr)
    assert allocator.stats().small.num_live_blocks == 1
    assert check_snapshot(allocator.snapshot()) == []


def test_configuration_defaults_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_ALLOC_CONF", "alignment_size:4096")
    assert TwoPoolAllocator(AddressSource()).malloc(1).size == 4096


def test_free_inside_malloc_is_queued_and_a_second_one_refused() -> None:
    source = CallingSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig())
    victim = allocator.malloc(1000)
    refused: list[Exception] = []

    def free_twice() -> None:
        allocator.free(victim.ptr)
        try:
            allocator.free(victim.ptr)
        except InvalidFreeError as error:
            refused.append(error)

    source.callback = free_twice
    allocator.malloc(3 * MIB)
    assert len(refused) == 1
    assert allocator.stats().small.num_live_blocks == 0
    assert check_snapshot(allocator.snapshot()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda allocator: allocator.malloc(8),
        lambda allocator: allocator.stats(),
        lambda allocator: allocator.release_idle(),
    ],
)
def test_other_calls_inside_malloc_are_refused(call: Callable[[TwoPoolAllocator], object]) -> None:
    source = CallingSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig())
    source.callback = lambda: call(allocator)
    with pytest.raises(AllocError, match="only free"):
        allocator.malloc(8)
    assert allocator.malloc(8).size == 512, "the allocator must work on after the refusal"
    assert check_snapshot(allocator.snapshot()) == []


class Owner:
    """Frees its block when collected; a reference to itself leaves that to the cycle collector."""

    def __init__(self, allocator: TwoPoolAllocator, nbytes: int) -> None:
        self.ptr = allocator.malloc(nbytes).ptr
        self.allocator = allocator
        self.itself = self

    def __del__(self) -> None:
        self.allocator.free(self.ptr)


def test_garbage_collection_at_any_moment_inside_the_allocator() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    try:
        with warnings.catch_warnings():
            # An exception in a finalizer would be reported this way only.
            warnings.simplefilter("error", pytest.PytestUnraisableExceptionWarning)
            for _ in range(1500):
                Owner(allocator, rng.choice((100, 5000, 2 * MIB, 3 * MIB + 1)))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert allocator.stats().allocated_bytes == 0, f"seed {seed}"
    assert check_snapshot(allocator.snapshot()) == [], f"seed {seed}"


def test_garbage_is_collected_before_memory_is_said_to_be_out() -> None:
    allocator = TwoPoolAllocator(AddressSource(4 * MIB), AllocatorConfig())
    gc.disable()
    try:
        Owner(allocator, 4 * MIB)
        assert allocator.malloc(4 * MIB).size == 4 * MIB
    finally:
        gc.enable()


def test_free_never_waits_for_another_thread() -> None:
    source = CallingSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig())
    victim = allocator.malloc(1000)
    inside, leave = threading.Event(), threading.Event()

    def wait_inside() -> None:
        inside.set()
        assert leave.wait(30)

    source.callback = wait_inside
    worker = threading.Thread(target=lambda: allocator.malloc(3 * MIB))
    worker.start()
    try:
        assert inside.wait(30)
        started = time.monotonic()
        allocator.free(victim.ptr)
        assert time.monotonic() - started < 20
        with pytest.raises(InvalidFreeError):
            allocator.free(victim.ptr)
    finally:
        leave.set()
        worker.join(30)
    assert allocator.stats().small.num_live_blocks == 0


def test_threads_never_share_a_byte_of_real_memory() -> None:
    """Each thread fills what it holds with its own number and finds it unchanged."""
    seed = random.SystemRandom().randrange(1 << 30)
    source = HostSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig())
    failures: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        held: list[tuple[int, memoryview]] = []
        for _ in range(400):
            if held and rng.random() < 0.5:
                ptr, view = held.pop(rng.randrange(len(held)))
                if bytes(view) != bytes([number]) * len(view):
                    failures.append(f"seed {seed}: thread {number} lost bytes at {ptr:#x}")
                view.release()
                allocator.free(ptr)
            else:
                size = rng.choice((1, 700, 4096, 100_000, MIB + 3))
                ptr = allocator.malloc(size, stream=rng.randrange(2)).ptr
                view = source.view(ptr, size)
                view[:] = bytes([number]) * size
                held.append((ptr, view))
        for ptr, view in held:
            view.release()
            allocator.free(ptr)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), f"seed {seed}"
    assert failures == []
    assert allocator.stats().allocated_bytes == 0, f"seed {seed}"
    assert check_snapshot(allocator.snapshot()) == [], f"seed {seed}"
    allocator.release_idle()
    assert source.used_bytes == 0


def test_of_two_threads_that_free_one_block_one_is_refused() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    ptrs = [allocator.malloc(512).ptr for _ in range(500)]
    refused: list[int] = []
    barrier = threading.Barrier(2)

    def free_all() -> None:
        barrier.wait(30)
        for ptr in ptrs:
            try:
                allocator.free(ptr)
            except InvalidFreeError:
                refused.append(ptr)

    threads = [threading.Thread(target=free_all) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(refused) == sorted(ptrs)
    assert allocator.stats().small.num_live_blocks == 0


def test_closed_allocator_gives_each_chunk_back_with_its_last_block() -> None:
    source = AddressSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig(large_pool_pre_alloc_in_mb=4))
    first, second = allocator.malloc(2 * MIB), allocator.malloc(2 * MIB)
    allocator.malloc(100)
    allocator.close()
    assert source.used_bytes == 6 * MIB
    allocator.free(first.ptr)
    assert source.used_bytes == 6 * MIB
    allocator.free(second.ptr)
    assert source.used_bytes == 2 * MIB
    with pytest.raises(AllocError, match="after close"):
        allocator.malloc(1)


def test_blocks_that_are_garbage_together_with_their_allocator_are_freed_by_their_finalizers() -> (
    None
):
    """In cycles the allocator's own end may come before that of the blocks."""
    source = HostSource()
    freed = []

    class Block:
        def __init__(self, blocks: "Blocks") -> None:
            self.blocks, self.ptr = blocks, blocks.allocator.malloc(MIB).ptr

        def __del__(self) -> None:
            self.blocks.allocator.free(self.ptr)
            freed.append(self.ptr)

    class Blocks:
        def __init__(self) -> None:
            self.allocator = TwoPoolAllocator(source, AllocatorConfig())
            self.held = [Block(self) for _ in range(50)]

    for _ in range(20):
        Blocks()
        gc.collect()
    assert len(freed) == 20 * 50
    assert source.used_bytes == 0


def test_an_allocator_that_is_dropped_gives_its_memory_back() -> None:
    source = HostSource()
    allocator = TwoPoolAllocator(source, AllocatorConfig(large_pool_pre_alloc_in_mb=16))
    allocator.free(allocator.malloc(100 * MIB).ptr)
    assert source.used_bytes >= 116 * MIB
    del allocator
    gc.collect()
    assert source.used_bytes == 0


def test_peaks_can_be_reset() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    allocator.free(allocator.malloc(5 * MIB).ptr)
    allocator.malloc(1000)
    before = allocator.stats()
    assert before.requested_peak_bytes == 5 * MIB
    allocator.reset_peaks()
    after = allocator.stats()
    assert (after.requested_peak_bytes, after.allocated_peak_bytes) == (1000, 1024)
    assert after.reserved_peak_bytes == after.reserved_bytes == 8 * MIB


def test_recorded_trace_starts_with_what_is_live_and_replays() -> None:
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig())
    dead = allocator.malloc(100)
    live = allocator.malloc(3 * MIB, stream=2)
    allocator.free(dead.ptr)
    allocator.start_recording()
    allocator.malloc(700)
    allocator.malloc(0)
    allocator.free(live.ptr)
    trace = allocator.stop_recording()
    allocator.malloc(1)
    described = [(event.action, event.size_bytes, event.stream) for event in trace]
    assert described == [("alloc", 3 * MIB, 2), ("alloc", 700, 0), ("free", 0, 0)]
    result = replay(trace, AllocatorConfig())
    assert (result.num_events, result.peak_live_bytes) == (3, 3 * MIB + 700)
    assert allocator.stop_recording() == []


def test_failed_request_leaves_everything_as_usable_as_before() -> None:
    allocator = TwoPoolAllocator(AddressSource(8 * MIB), AllocatorConfig())
    kept = allocator.malloc(4 * MIB)
    for _ in range(3):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(6 * MIB)
    assert check_snapshot(allocator.snapshot()) == []
    allocator.malloc(4 * MIB)
    allocator.free(kept.ptr)
    assert allocator.malloc(4 * MIB).ptr == kept.ptr

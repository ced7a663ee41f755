"""What is tried, in which order, before a request fails: as the source and the events see it."""

from itertools import groupby

import pytest

from gpu_alloc import AllocatorConfig, ChunkSource, OutOfMemoryError, TwoPoolAllocator
from gpu_alloc.sources import StreamEvents

pytestmark = pytest.mark.usefixtures("each_core")
MIB = 1 << 20


class Logged(ChunkSource):
    """Pages of 2 MiB up to a capacity that changes, and everything that is asked of it."""

    def __init__(self) -> None:
        self.alignment_bytes = self.granularity_bytes = 2 * MIB
        self.capacity_mb, self.held_mb, self.next = 1000, 0, 1 << 40
        self.log: list[str] = []

    def acquire(self, size_bytes: int) -> int | None:
        size_mb = size_bytes // MIB
        fits = self.held_mb + size_mb <= self.capacity_mb
        self.log.append(f"take {size_mb}" if fits else f"no {size_mb}")
        if not fits:
            return None
        self.held_mb += size_mb
        self.next += size_bytes
        return self.next - size_bytes

    def release(self, ptr: int, size_bytes: int) -> None:
        self.held_mb -= size_bytes // MIB
        self.log.append(f"give {size_bytes // MIB}")


class Asked(StreamEvents):
    """Work of other streams that is done once it is waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.done = log, False

    def record(self, stream: int) -> int:
        return stream

    def is_done(self, event: int) -> bool:
        self.log.append("ask the event")
        return self.done

    def wait(self, event: int) -> None:
        self.log.append("wait for the event")
        self.done = True

    def is_capturing(self, stream: int) -> bool:
        return False


def made(settings: str) -> tuple[TwoPoolAllocator, Logged, Asked]:
    source = Logged()
    events = Asked(source.log)
    allocator = TwoPoolAllocator(
        source,
        AllocatorConfig.parse(settings),
        on_exhausted=lambda: source.log.append("collect garbage"),
        events=events,
    )
    return allocator, source, events


def test_idle_chunks_exact_growth_events_garbage_then_waiting_and_the_slab_stays() -> None:
    allocator, source, _ = made(
        "small_pool_pre_alloc_in_mb:2,large_pool_auto_growth_chunk_size_in_mb:16"
    )
    allocator.free(allocator.malloc(13 * MIB, stream=3).ptr)  # an idle chunk
    used = allocator.malloc(13 * MIB).ptr
    allocator.record_stream(used, 9)
    allocator.free(used)
    source.capacity_mb = 24
    source.log.clear()
    assert allocator.malloc(10 * MIB).size == 10 * MIB
    steps = [step for step, _ in groupby(source.log)]
    assert steps == [
        "ask the event",
        "no 16",
        "give 16",
        "no 16",
        "no 10",
        "ask the event",
        "no 16",
        "no 10",
        "collect garbage",
        "ask the event",
        "wait for the event",
    ]
    assert allocator.stats().small.reserved_bytes == 2 * MIB


def test_what_an_event_gives_back_is_used_before_anything_is_taken_or_given_back() -> None:
    allocator, source, events = made("")
    idle = allocator.malloc(20 * MIB).ptr
    used = allocator.malloc(13 * MIB).ptr
    allocator.record_stream(used, 9)
    allocator.free(used)
    allocator.free(idle)
    events.done = True
    source.log.clear()
    assert allocator.malloc(13 * MIB).ptr == used
    assert source.log == ["ask the event"]


def test_the_other_pool_is_asked_after_exact_growth_and_before_garbage() -> None:
    allocator, source, _ = made("small_pool_pre_alloc_in_mb:6")
    source.capacity_mb = 6
    source.log.clear()
    assert allocator.malloc(3 * MIB).size == 3 * MIB
    assert source.log == ["no 4", "no 4"]
    assert allocator.stats().small.allocated_bytes == 3 * MIB


def test_the_idle_slab_is_broken_up_last() -> None:
    allocator, source, _ = made("small_pool_pre_alloc_in_mb:4")
    source.capacity_mb = 6
    source.log.clear()
    assert allocator.malloc(5 * MIB).size == 5 * MIB
    collected = source.log.index("collect garbage")
    assert set(source.log[:collected]) == {"no 6"}
    assert source.log[-2:] == ["give 4", "take 6"]
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(5 * MIB)

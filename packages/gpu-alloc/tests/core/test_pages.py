"""Address space with pages mapped behind it: both cores, against a model of pages."""

import random
from typing import Any

import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    LifetimePlan,
    OutOfMemoryError,
    TraceEvent,
    TwoPoolAllocator,
    check_snapshot,
    minimal_capacity,
)
from gpu_alloc.errors import AllocValueError, IgnoredSettingWarning
from gpu_alloc.native import NativeAllocator, is_compiled
from gpu_alloc.sources import PagedAddressSource, PagedHostSource, PagedSource
from gpu_alloc.trace import requests as module

MIB = 1 << 20
PAGE = 2 * MIB
CONFIG = AllocatorConfig(use_virtual_memory=True)
CORES = [TwoPoolAllocator, *([NativeAllocator] if is_compiled() else [])]


def pages_of(blocks: dict[int, int]) -> set[int]:
    return {
        page
        for ptr, size in blocks.items()
        for page in range(ptr // PAGE, -(-(ptr + size) // PAGE))
    }


class Recorded(PagedSource):
    """Invented addresses, and which of their pages are mapped."""

    def __init__(self, capacity_bytes: int) -> None:
        self.inner = PagedAddressSource(capacity_bytes)
        self.mapped: set[int] = set()

    def acquire(self, size_bytes: int) -> int | None:
        return self.inner.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        assert not self.mapped & set(range(ptr // PAGE, (ptr + size_bytes) // PAGE))
        self.inner.release(ptr, size_bytes)

    def map(self, ptr: int, size_bytes: int) -> bool:
        pages = set(range(ptr // PAGE, (ptr + size_bytes) // PAGE))
        assert ptr % PAGE == 0 and size_bytes % PAGE == 0 and not pages & self.mapped
        if not self.inner.map(ptr, size_bytes):
            return False
        self.mapped |= pages
        return True

    def unmap(self, ptr: int, size_bytes: int) -> None:
        pages = set(range(ptr // PAGE, (ptr + size_bytes) // PAGE))
        assert pages <= self.mapped
        self.mapped -= pages
        self.inner.unmap(ptr, size_bytes)


class World:
    def __init__(self, kind: Any, capacity_bytes: int) -> None:
        self.source = Recorded(capacity_bytes)
        self.allocator = kind(self.source, CONFIG, on_exhausted=lambda: None)

    def follow(self, plan: LifetimePlan | None) -> str:
        try:
            self.allocator.follow(plan)
        except AllocValueError as error:
            return str(error)
        return ""

    def malloc(self, size: int, stream: int) -> tuple[int, int] | str:
        try:
            return tuple(self.allocator.malloc(size, stream))
        except OutOfMemoryError as error:
            return str(error)


def follow_a_plan(rng: random.Random, worlds: list[World], seed: int) -> None:
    size = rng.choice([PAGE, 9 * MIB, 3 * MIB])
    places = tuple((size, s, s * 32 * MIB + rng.randrange(4) * MIB) for s in (0, 0, 1, 2))
    plan = rng.choice([LifetimePlan(places=places, alignment_size=512), None])
    said = [w.follow(plan) for w in worlds]
    assert all(each == said[0] for each in said), seed
    for w in worlds:
        w.allocator.begin_step()


def change(rng: random.Random, worlds: list[World], seed: int) -> None:
    """Follow a plan, set a limit, or give idle memory back."""
    action = rng.random()
    if action < 0.2:
        follow_a_plan(rng, worlds, seed)
    elif action < 0.5:
        limit = rng.choice([0, 0, 12 * MIB])
        for w in worlds:
            w.allocator.set_limit(limit)
    else:
        options = {"include_pre_allocated": rng.random() < 0.3, "stream": rng.choice([None, 1])}
        released = [w.allocator.release_idle(**options) for w in worlds]
        assert all(r == released[0] for r in released), seed


def random_operations(seed: int, num_operations: int) -> int:
    """Of both cores at once; how many requests failed."""
    rng = random.Random(seed)
    capacity = rng.choice([0, 8, 30, 64]) * MIB
    worlds = [World(kind, capacity) for kind in CORES]
    live: dict[int, int] = {}
    failed = 0
    for _ in range(num_operations):
        action = rng.random()
        if action < 0.55:
            size = rng.choice([rng.randrange(1, 3000), rng.randrange(1, 3 * MIB), 9 * MIB, PAGE])
            stream = rng.randrange(3)
            found = [w.malloc(size, stream) for w in worlds]
            assert all(f == found[0] for f in found), seed
            if isinstance(found[0], str):
                failed += 1
                # Wherever a block starts, it touches at most one page more than it fills.
                need = len(pages_of(live)) * PAGE + -(-size // PAGE) * PAGE + PAGE
                limit = worlds[0].allocator.limit_bytes or capacity
                assert need > min(limit, capacity), (seed, "no room although pages are free")
            else:
                live[found[0][0]] = found[0][1]
        elif action < 0.95 and live:
            ptr = rng.choice(sorted(live))
            del live[ptr]
            for w in worlds:
                w.allocator.free(ptr)
        else:
            change(rng, worlds, seed)
        check_worlds(worlds, live, seed)
    for w in worlds:
        for ptr in live:
            w.allocator.free(ptr)
        w.allocator.close()
        assert not w.source.mapped
        assert w.source.inner.used_bytes == 0
    return failed


def check_worlds(worlds: list[World], live: dict[int, int], seed: int) -> None:
    snapshots = [w.allocator.snapshot() for w in worlds]
    stats = [w.allocator.stats() for w in worlds]
    assert (
        all(s == snapshots[0] for s in snapshots[1:])
        or len(worlds) == 1
        or (snapshots[1].chunks == snapshots[0].chunks)
    ), seed
    assert all(s.chunks == snapshots[0].chunks for s in snapshots), seed
    assert all(s == stats[0] for s in stats), seed
    for w, snapshot, each in zip(worlds, snapshots, stats, strict=True):
        assert check_snapshot(snapshot) == [], seed
        in_use = {b.ptr: b.size for c in snapshot.chunks for b in c.blocks if not b.is_free}
        assert in_use == live, seed
        assert pages_of(live) <= w.source.mapped, (seed, "a live block without memory")
        assert each.reserved_bytes == len(w.source.mapped) * PAGE == w.source.inner.used_bytes, seed
        assert each.reserved_peak_bytes >= each.reserved_bytes >= each.allocated_bytes
        assert 0 <= each.fragmentation <= 1


def test_both_cores_map_the_same_pages_and_fail_only_without_pages() -> None:
    first = random.SystemRandom().randrange(1 << 30)
    failed = sum(random_operations(seed, 60) for seed in range(first, first + 12))
    assert failed, f"seeds from {first}"


@pytest.mark.parametrize("kind", CORES)
def test_freed_pages_serve_a_larger_block_elsewhere(kind: Any) -> None:
    source = PagedAddressSource(12 * MIB)
    allocator = kind(source, CONFIG)
    blocks = [allocator.malloc(2 * MIB) for _ in range(6)]
    for block in blocks[::2]:
        allocator.free(block.ptr)
    assert source.used_bytes == 12 * MIB, "pages stay until they are needed"
    large = allocator.malloc(6 * MIB)
    assert {b.ptr for b in blocks[1::2]}.isdisjoint(range(large.ptr, large.ptr + large.size))
    assert source.used_bytes == 12 * MIB
    with pytest.raises(OutOfMemoryError, match="no room"):
        allocator.malloc(2 * MIB)


@pytest.mark.parametrize("kind", CORES)
def test_host_memory_is_mapped_and_given_back(kind: Any) -> None:
    source = PagedHostSource(8 * MIB)
    allocator = kind(source, CONFIG)
    small, large = allocator.malloc(1000), allocator.malloc(5 * MIB)
    source.view(small.ptr, 5)[:] = b"hello"
    source.view(large.ptr, large.size)[-1] = 7
    assert bytes(source.view(small.ptr, 5)) == b"hello"
    allocator.free(large.ptr)
    assert allocator.release_idle() == 6 * MIB == 8 * MIB - source.used_bytes
    again = allocator.malloc(5 * MIB)
    assert again.ptr == large.ptr, "in place"
    assert source.view(again.ptr, again.size)[-1] == 0, "new pages"
    with pytest.raises(AllocValueError, match="not inside one chunk"):
        source.view(small.ptr - (1 << 40), 5)
    for block in (small, again):
        allocator.free(block.ptr)
    allocator.close()
    assert source.used_bytes == 0


def test_memory_beyond_the_operating_systems_is_refused() -> None:
    assert PagedHostSource().acquire(1 << 60) is None


@pytest.mark.parametrize("kind", CORES)
def test_source_and_settings_agree(kind: Any) -> None:
    with pytest.raises(AllocValueError, match="a PagedSource needs it to be True"):
        kind(AddressSource(), CONFIG)
    with pytest.raises(AllocValueError, match="use_virtual_memory is False"):
        kind(PagedAddressSource(), AllocatorConfig())


def test_settings_of_chunks_are_ignored_with_a_warning() -> None:
    with pytest.warns(IgnoredSettingWarning, match="large_pool_pre_alloc_in_mb=64 is ignored"):
        AllocatorConfig(use_virtual_memory=True, large_pool_pre_alloc_in_mb=64)


def test_a_trace_replays_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {i: 3 * MIB + 1 for i in range(8)}
    trace = [TraceEvent(action="alloc", block_id=i, size_bytes=s) for i, s in sizes.items()]
    trace += [TraceEvent(action="free", block_id=i) for i in range(0, 8, 2)]
    trace += [TraceEvent(action="alloc", block_id=9, size_bytes=9 * MIB)]
    need = minimal_capacity(trace, CONFIG)
    assert 24 * MIB < need <= 34 * MIB
    monkeypatch.setattr(module, "is_compiled", lambda: False)
    assert minimal_capacity(trace, CONFIG) == need


class BrokenOnce(PagedSource):
    """Of whose calls of `map` one raises, after nothing was mapped."""

    def __init__(self) -> None:
        self.pages = PagedAddressSource()
        self.breaks = False

    def acquire(self, size_bytes: int) -> int | None:
        return self.pages.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        self.pages.release(ptr, size_bytes)

    def map(self, ptr: int, size_bytes: int) -> bool:
        if self.breaks:
            self.breaks = False
            raise KeyboardInterrupt
        return self.pages.map(ptr, size_bytes)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self.pages.unmap(ptr, size_bytes)


@pytest.mark.parametrize("kind", CORES)
def test_a_mapping_that_is_broken_off_loses_nothing(kind: Any) -> None:
    source = BrokenOnce()
    allocator = kind(source, CONFIG)
    first = allocator.malloc(3 * MIB).ptr
    source.breaks = True
    with pytest.raises(KeyboardInterrupt):
        allocator.malloc(9 * MIB)
    assert check_snapshot(allocator.snapshot()) == []
    assert allocator.stats().allocated_bytes == 3 * MIB
    assert allocator.stats().reserved_bytes == source.pages.used_bytes
    allocator.free(first)
    allocator.free(allocator.malloc(12 * MIB).ptr)
    allocator.release_idle(include_pre_allocated=True)
    assert source.pages.used_bytes == 0

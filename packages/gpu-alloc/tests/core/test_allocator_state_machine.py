"""Random operations against a model that knows only requests, addresses and the snapshot.

After every operation the independent checker runs: no overlap, alignment, full cover, merged
neighbours, free lists equal to the free blocks. Every placement is compared with the best fit found
by a linear scan, and every failure with what the source could still have given.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    OutOfMemoryError,
    Snapshot,
    TwoPoolAllocator,
    check_snapshot,
)

MIB = 1 << 20
STREAMS = st.integers(0, 2)
SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(0, 2 * MIB),
    st.sampled_from([MIB - 1, MIB, MIB + 1, 2 * MIB, 4 * MIB]),
    st.integers(MIB, 9 * MIB),
)

CONFIGS = st.builds(
    AllocatorConfig,
    small_pool_size_in_mb=st.sampled_from([1, 1, 2]),
    small_pool_auto_growth_chunk_size_in_mb=st.sampled_from([0, 1, 2, 6]),
    large_pool_auto_growth_chunk_size_in_mb=st.sampled_from([0, 3, 8]),
    small_pool_pre_alloc_in_mb=st.sampled_from([0, 0, 2]),
    large_pool_pre_alloc_in_mb=st.sampled_from([0, 0, 4]),
    alignment_size=st.sampled_from([1, 64, 512]),
    free_idle_chunk=st.booleans(),
    free_when_no_cache_hit=st.booleans(),
    memory_limit_in_mb=st.sampled_from([0, 0, 7, 20]),
)


def _fits(snapshot: Snapshot, pool: str, stream: int, size: int) -> list[tuple[int, int]]:
    """(size, address) of every run of free blocks of `pool` that `stream`, and no other, used."""
    found = []
    for chunk in snapshot.chunks:
        run_ptr = run_size = 0
        for block in chunk.blocks if chunk.pool == pool else ():
            if block.is_free and block.stream in (stream, None):
                run_ptr, run_size = run_ptr or block.ptr, run_size + block.size
            else:
                found.append((run_size, run_ptr))
                run_ptr = run_size = 0
        found.append((run_size, run_ptr))
    return [(run_size, ptr) for run_size, ptr in found if run_size >= max(size, 1)]


class AllocatorMachine(RuleBasedStateMachine):
    allocator: TwoPoolAllocator

    @initialize(
        config=CONFIGS,
        capacity_mb=st.integers(0, 40),
        page_bytes=st.sampled_from([512, 4096, 2 * MIB]),
    )
    def make(self, config: AllocatorConfig, capacity_mb: int, page_bytes: int) -> None:
        self.source = AddressSource(capacity_mb * MIB, granularity_bytes=page_bytes)
        try:
            self.allocator = TwoPoolAllocator(self.source, config, on_exhausted=lambda: None)
        except OutOfMemoryError:
            assert self.source.used_bytes == 0
            self.allocator = TwoPoolAllocator(self.source, AllocatorConfig())
        self.config = self.allocator.config
        self.live: dict[int, tuple[int, int, int]] = {}  # ptr -> size, padded size, stream
        self.requested_peak = 0

    @rule(size=SIZES, stream=STREAMS)
    def malloc(self, size: int, stream: int) -> None:
        alignment = self.config.alignment_size
        padded = -(-size // alignment) * alignment
        before = self.allocator.snapshot()
        home = "small" if padded <= self.config.small_pool_size_in_mb * MIB else "large"
        fits = _fits(before, home, stream, padded)
        held = self.source.used_bytes
        try:
            ptr, given = self.allocator.malloc(size, stream)
        except OutOfMemoryError:
            assert size > 0
            assert not fits
            self._check_that_nothing_fits(stream, padded)
            return
        if size == 0:
            assert (ptr, given) == (0, 0)
            return
        assert given == padded
        limit = self.allocator.limit_bytes
        assert not limit or self.source.used_bytes <= max(held, limit), "grew beyond the limit"
        if fits:
            best_size, best_ptr = min(fits)
            assert best_ptr <= ptr
            assert ptr + padded == best_ptr + best_size, "not the best fit"
        self.live[ptr] = (size, padded, stream)
        total = sum(each[0] for each in self.live.values())
        self.requested_peak = max(self.requested_peak, total)

    def _check_that_nothing_fits(self, stream: int, padded: int) -> None:
        after = self.allocator.snapshot()
        for pool in ("small", "large"):
            assert not _fits(after, pool, stream, padded)
        assert all(any(not block.is_free for block in chunk.blocks) for chunk in after.chunks), (
            "idle memory was kept"
        )
        page = self.source.granularity_bytes
        need = self.source.used_bytes + -(-padded // page) * page
        limit = self.allocator.limit_bytes
        assert need > (self.source.capacity_bytes or 0) or (limit and need > limit)

    @rule(data=st.data())
    def free(self, data: Any) -> None:
        if self.live:
            ptr = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[ptr]
            self.allocator.free(ptr)

    @rule(include=st.booleans())
    def release_idle(self, include: bool) -> None:
        before = self.source.used_bytes
        assert before - self.allocator.release_idle(include_pre_allocated=include) == (
            self.source.used_bytes
        )

    @rule(limit_mb=st.sampled_from([0, 5, 30]))
    def set_limit(self, limit_mb: int) -> None:
        self.allocator.set_limit(limit_mb * MIB)

    @rule()
    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()
        self.requested_peak = sum(each[0] for each in self.live.values())

    @invariant()
    def memory_is_sound(self) -> None:
        snapshot = self.allocator.snapshot()
        assert check_snapshot(snapshot) == []
        in_use = {
            block.ptr: (block.requested_bytes, block.size, block.stream)
            for chunk in snapshot.chunks
            for block in chunk.blocks
            if not block.is_free
        }
        assert in_use == self.live
        stats = self.allocator.stats()
        assert stats.requested_bytes == sum(size for size, _, _ in self.live.values())
        assert stats.allocated_bytes == sum(padded for _, padded, _ in self.live.values())
        assert stats.reserved_bytes == self.source.used_bytes
        assert stats.reserved_bytes == sum(chunk.size for chunk in snapshot.chunks)
        assert stats.requested_peak_bytes == self.requested_peak
        assert stats.reserved_peak_bytes >= stats.reserved_bytes >= stats.allocated_bytes


def test_random_operations_keep_memory_sound() -> None:
    run_state_machine_as_test(
        AllocatorMachine,
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None, database=None),
    )

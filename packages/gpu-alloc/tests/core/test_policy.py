import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    ChunkSource,
    OutOfMemoryError,
    TwoPoolAllocator,
    check_snapshot,
)

MIB = 1 << 20


def _allocator(capacity_mb=None, **config):
    source = AddressSource(None if capacity_mb is None else capacity_mb * MIB)
    made = TwoPoolAllocator(source, AllocatorConfig(**config), on_exhausted=lambda: None)
    return made, source


def test_requests_are_routed_by_padded_size():
    allocator, _ = _allocator()
    allocator.malloc(MIB)
    assert allocator.stats().small.num_live_blocks == 1
    allocator.malloc(MIB + 1)
    assert allocator.stats().large.num_live_blocks == 1


def test_threshold_zero_is_one_pool():
    allocator, _ = _allocator(small_pool_size_in_mb=0)
    allocator.malloc(1)
    assert allocator.stats().small.num_chunks == 0
    assert allocator.stats().large.num_live_blocks == 1


def test_small_requests_share_a_chunk_and_large_ones_do_not_enter_it():
    allocator, source = _allocator(small_pool_auto_growth_chunk_size_in_mb=4)
    for _ in range(4):
        allocator.malloc(MIB)
    assert source.used_bytes == 4 * MIB
    allocator.malloc(3 * MIB)
    assert source.used_bytes == 8 * MIB


def test_growth_takes_the_larger_of_chunk_and_request():
    allocator, source = _allocator(large_pool_auto_growth_chunk_size_in_mb=20)
    allocator.malloc(2 * MIB)
    assert source.used_bytes == 20 * MIB
    allocator.malloc(18 * MIB)
    assert source.used_bytes == 20 * MIB
    allocator.malloc(21 * MIB)
    assert source.used_bytes == 42 * MIB  # the source grants pages of 2 MiB


def test_best_fit_prefers_the_tightest_hole():
    allocator, _ = _allocator()
    holes = [allocator.malloc(size * MIB) for size in (8, 4, 6)]
    for hole in holes:
        allocator.free(hole.ptr)
    assert allocator.malloc(5 * MIB).ptr == holes[2].ptr + MIB
    assert allocator.malloc(4 * MIB).ptr == holes[1].ptr


def test_pre_allocation_is_used_first_and_kept_by_release_idle():
    allocator, source = _allocator(large_pool_pre_alloc_in_mb=64, small_pool_pre_alloc_in_mb=2)
    assert source.used_bytes == 66 * MIB
    held = [allocator.malloc(16 * MIB) for _ in range(4)]
    assert source.used_bytes == 66 * MIB
    extra = allocator.malloc(16 * MIB)
    assert source.used_bytes == 82 * MIB
    for allocation in (*held, extra):
        allocator.free(allocation.ptr)
    assert allocator.release_idle() == 16 * MIB
    assert source.used_bytes == 66 * MIB
    assert allocator.release_idle(include_pre_allocated=True) == 66 * MIB
    assert source.used_bytes == 0


def test_pre_allocation_that_does_not_fit_fails_at_once_and_leaks_nothing():
    source = AddressSource(10 * MIB)
    config = AllocatorConfig(small_pool_pre_alloc_in_mb=4, large_pool_pre_alloc_in_mb=8)
    with pytest.raises(OutOfMemoryError, match="large pool"):
        TwoPoolAllocator(source, config)
    assert source.used_bytes == 0


def test_idle_chunks_of_the_other_pool_and_stream_are_given_up_before_failing():
    allocator, source = _allocator(capacity_mb=8, small_pool_auto_growth_chunk_size_in_mb=4)
    small = allocator.malloc(100, stream=3)
    large = allocator.malloc(4 * MIB, stream=4)
    allocator.free(small.ptr)
    allocator.free(large.ptr)
    assert allocator.malloc(8 * MIB, stream=5).size == 8 * MIB
    assert source.used_bytes == 8 * MIB


def test_pre_allocation_survives_when_other_idle_chunks_are_enough() -> None:
    allocator, source = _allocator(capacity_mb=16, small_pool_pre_alloc_in_mb=4)
    allocator.free(allocator.malloc(4 * MIB, stream=1).ptr)
    allocator.malloc(10 * MIB, stream=2)
    assert source.used_bytes == 14 * MIB


def test_growth_falls_back_to_the_exact_size():
    allocator, source = _allocator(capacity_mb=10, large_pool_auto_growth_chunk_size_in_mb=64)
    assert allocator.malloc(6 * MIB).size == 6 * MIB
    assert source.used_bytes == 6 * MIB


def test_room_in_the_other_pool_is_borrowed_and_returned():
    allocator, _ = _allocator(capacity_mb=4, large_pool_auto_growth_chunk_size_in_mb=4)
    large = allocator.malloc(2 * MIB)
    small = allocator.malloc(1000)
    assert allocator.stats().small.num_chunks == 0
    assert allocator.stats().large.num_live_blocks == 2
    allocator.free(large.ptr)
    allocator.free(small.ptr)
    assert allocator.stats().large.largest_free_bytes == 4 * MIB


def test_pre_allocation_is_broken_up_rather_than_failing():
    allocator, source = _allocator(
        capacity_mb=10, small_pool_pre_alloc_in_mb=2, large_pool_pre_alloc_in_mb=4
    )
    assert allocator.malloc(9 * MIB).size == 9 * MIB
    assert source.used_bytes == 10 * MIB


def test_limit_counts_both_pools_and_names_itself():
    allocator, source = _allocator(memory_limit_in_mb=6)
    allocator.malloc(100)
    allocator.malloc(4 * MIB)
    with pytest.raises(OutOfMemoryError, match="memory_limit_in_mb"):
        allocator.malloc(2 * MIB)
    assert source.used_bytes == 6 * MIB
    allocator.set_limit(8 * MIB)
    allocator.malloc(2 * MIB)
    assert allocator.limit_bytes == 8 * MIB
    with pytest.raises(ValueError, match="negative"):
        allocator.set_limit(-1)


def test_free_idle_chunk_gives_back_at_once_but_not_the_pre_allocation():
    allocator, source = _allocator(free_idle_chunk=True, large_pool_pre_alloc_in_mb=4)
    slab, grown = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.free(grown.ptr)
    assert source.used_bytes == 4 * MIB
    allocator.free(slab.ptr)
    assert source.used_bytes == 4 * MIB


def test_free_when_no_cache_hit_gives_idle_chunks_back_before_growing():
    allocator, source = _allocator(free_when_no_cache_hit=True)
    allocator.free(allocator.malloc(4 * MIB).ptr)
    allocator.malloc(6 * MIB)
    assert source.used_bytes == 6 * MIB


def test_other_streams_do_not_get_a_freed_block():
    allocator, source = _allocator()
    allocator.free(allocator.malloc(4 * MIB, stream=1).ptr)
    allocator.malloc(4 * MIB, stream=2)
    assert source.used_bytes == 8 * MIB
    allocator.malloc(4 * MIB, stream=1)
    assert source.used_bytes == 8 * MIB


def test_alignment_beyond_the_source_is_refused():
    class Coarse(ChunkSource):
        alignment_bytes = 256
        granularity_bytes = 4096

        def acquire(self, size_bytes):
            return None

        def release(self, ptr, size_bytes):
            raise AssertionError

    with pytest.raises(ValueError, match=r"alignment_size=512.*256"):
        TwoPoolAllocator(Coarse(), AllocatorConfig())


def test_a_slab_serves_every_stream_block_by_block():
    allocator, source = _allocator(capacity_mb=64, large_pool_pre_alloc_in_mb=60)
    allocator.malloc(2 * MIB, stream=0)
    for stream in (7, 8, 0):
        allocator.malloc(8 * MIB, stream=stream)
    assert allocator.malloc(34 * MIB, stream=9).size == 34 * MIB
    assert source.used_bytes == 60 * MIB


def test_one_pool_grows_by_its_own_chunk_size_and_may_have_a_slab():
    allocator, source = _allocator(small_pool_size_in_mb=0, auto_growth_chunk_size_in_mb=16)
    allocator.malloc(100)
    allocator.malloc(3 * MIB)
    assert source.used_bytes == 16 * MIB
    allocator, source = _allocator(small_pool_size_in_mb=0, large_pool_pre_alloc_in_mb=6)
    allocator.malloc(100)
    allocator.malloc(3 * MIB)
    assert source.used_bytes == 6 * MIB


@pytest.mark.filterwarnings("ignore::gpu_alloc.errors.IgnoredSettingWarning")
def test_one_pool_takes_no_pre_allocation_for_the_small_pool():
    _, source = _allocator(small_pool_size_in_mb=0, small_pool_pre_alloc_in_mb=6)
    assert source.used_bytes == 0


def test_release_of_one_stream_leaves_what_others_have_used():
    allocator, source = _allocator()
    for stream in (1, 2):
        allocator.free(allocator.malloc(4 * MIB, stream=stream).ptr)
    assert allocator.release_idle(stream=1) == 4 * MIB
    assert allocator.release_idle(stream=3) == 0
    assert source.used_bytes == 4 * MIB


def test_a_run_may_take_more_than_a_million_chunks():
    allocator, source = _allocator()
    allocator._policy._num_chunks = 1 << 21
    blocks = [allocator.malloc(size * MIB) for size in (4, 2, 6)]
    for block in blocks:
        allocator.free(block.ptr)
    assert allocator.malloc(2 * MIB).ptr == blocks[1].ptr
    assert allocator.stats().large.largest_free_bytes == 6 * MIB
    assert check_snapshot(allocator.snapshot()) == []
    assert source.used_bytes == 12 * MIB

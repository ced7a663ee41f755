from gpu_alloc.core.pool import Pool


def _pool(*chunks):
    pool = Pool(name="large", index=1, chunk_bytes=0)
    for number, (ptr, size) in enumerate(chunks):
        pool.add_chunk(ptr=ptr, size=size, pre_allocated=False, number=number)
    return pool


def _take(pool, size, stream=0):
    block = pool.take(size, stream)
    if block is not None:
        pool.count_use(block, size)
    return block


def test_freed_neighbours_merge_in_every_order():
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        pool = _pool((1 << 20, 3 * 512))
        blocks = [_take(pool, 512) for _ in range(3)]
        assert _take(pool, 512) is None
        for index in order:
            pool.give(blocks[index])
        assert list(pool.free_entries()) == [(0, 1 << 20, 3 * 512)], order
        assert pool.stats().fragmentation == 0.0


def test_chunks_whose_addresses_touch_are_not_merged():
    pool = _pool((4096, 4096), (8192, 4096))
    first, second = _take(pool, 4096), _take(pool, 4096)
    pool.give(first)
    pool.give(second)
    assert _take(pool, 8192) is None
    assert sorted(pool.free_entries()) == [(0, 4096, 4096), (0, 8192, 4096)]


def test_block_returns_to_its_own_stream():
    pool = _pool((4096, 4096))
    block = _take(pool, 4096, stream=7)
    assert _take(pool, 512, stream=8) is None
    pool.give(block)
    assert _take(pool, 512, stream=8) is None
    assert _take(pool, 512, stream=7) is not None


def test_unused_memory_is_free_for_every_stream_block_by_block():
    pool = _pool((4096, 4096))
    assert pool.free_bytes(1) == pool.free_bytes(2) == pool.largest_free_bytes(2) == 4096
    assert _take(pool, 8192, stream=1) is None
    first, second = _take(pool, 512, stream=2), _take(pool, 1024, stream=1)
    assert (first.ptr, second.ptr) == (4096 + 3584, 4096 + 2560)
    pool.give(first)
    assert (pool.free_bytes(1), pool.free_bytes(2)) == (2560, 2560 + 512)


def test_a_free_block_and_the_unused_memory_before_it_are_one_place_of_its_stream():
    pool = _pool((4096, 4096))
    block = _take(pool, 1024, stream=1)
    pool.give(block)
    assert pool.largest_free_bytes(1) == 4096
    assert pool.largest_free_bytes(2) == 3072
    assert sorted(pool.free_entries(), key=repr) == [(1, 4096, 4096), (None, 4096, 3072)]
    assert _take(pool, 512, stream=1).ptr == 8192 - 512, "from the end, as if nothing were split"
    assert _take(pool, 3584, stream=1).ptr == 4096
    assert list(pool.free_entries()) == []


def test_another_stream_takes_unused_memory_away_from_a_place():
    pool = _pool((4096, 4096))
    pool.give(_take(pool, 1024, stream=1))
    other = _take(pool, 3072, stream=2)
    assert list(pool.free_entries()) == [(1, 4096 + 3072, 1024)]
    pool.give(other)
    assert pool.largest_free_bytes(1) == 1024
    assert pool.largest_free_bytes(2) == 3072
    assert [chunk.ptr for chunk in pool.idle_chunks(include_pre_allocated=False)] == [4096]
    assert pool.idle_chunks(include_pre_allocated=False, stream=1) == []
    pool.remove_chunk(pool.chunks[4096])
    assert list(pool.free_entries()) == []


def test_streams_that_are_gone_leave_no_lists_behind():
    pool = _pool((4096, 1 << 20))
    for stream in range(100):
        block = _take(pool, 512, stream=stream)
        pool.give(block)
        assert _take(pool, 512, stream=stream) is block
    assert len(pool._unused) < 20


def test_counters_and_fragmentation():
    pool = _pool((1 << 20, 4 * 512))
    blocks = [pool.take(512, 0) for _ in range(4)]
    for block in blocks:
        pool.count_use(block, 100)
    pool.give(blocks[0])
    pool.give(blocks[2])
    stats = pool.stats()
    assert (stats.requested_bytes, stats.requested_peak_bytes) == (200, 400)
    assert (stats.allocated_bytes, stats.allocated_peak_bytes) == (1024, 2048)
    assert (stats.reserved_bytes, stats.free_bytes, stats.largest_free_bytes) == (2048, 1024, 512)
    assert (stats.num_live_blocks, stats.num_free_blocks, stats.num_chunks) == (2, 2, 1)
    assert stats.fragmentation == 0.5
    pool.reset_peaks()
    assert pool.stats().allocated_peak_bytes == 1024


def test_only_idle_chunks_are_listed_and_removed():
    pool = _pool((4096, 4096), (1 << 20, 512))
    pool.add_chunk(ptr=1 << 21, size=512, pre_allocated=True, number=2)
    used = _take(pool, 4096)
    assert [c.ptr for c in pool.idle_chunks(include_pre_allocated=False)] == [1 << 20]
    assert [c.ptr for c in pool.idle_chunks(include_pre_allocated=True)] == [1 << 20, 1 << 21]
    for chunk in pool.idle_chunks(include_pre_allocated=True):
        pool.remove_chunk(chunk)
    assert pool.reserved_bytes == used.size
    assert list(pool.free_entries()) == []


def test_of_equal_places_the_one_in_the_oldest_chunk_is_taken_wherever_chunks_lie():
    pool = _pool((1 << 30, 4096), (4096, 4096), (1 << 20, 4096))
    assert [_take(pool, 4096).ptr for _ in range(3)] == [1 << 30, 4096, 1 << 20]

from gpu_alloc.core.block import Chunk


def test_split_and_absorb_keep_the_chunk_covered():
    chunk = Chunk(ptr=4096, size=4096, pool_index=0, pre_allocated=False)
    last = chunk.first.split(1024)
    middle = chunk.first.split(512)
    assert [(b.ptr, b.size) for b in chunk.blocks()] == [(4096, 2560), (6656, 512), (7168, 1024)]
    assert last.prev is middle
    assert middle.next is last
    middle.absorb_next()
    chunk.first.absorb_next()
    assert [(b.ptr, b.size) for b in chunk.blocks()] == [(4096, 4096)]


def test_absorbing_past_the_end_does_nothing():
    chunk = Chunk(ptr=0, size=512, pool_index=0, pre_allocated=False)
    chunk.first.absorb_next()
    assert chunk.first.size == 512


def test_chunk_in_use_is_not_idle():
    chunk = Chunk(ptr=0, size=512, pool_index=0, pre_allocated=False)
    assert chunk.is_idle()
    chunk.num_live = 1
    assert not chunk.is_idle()


def test_the_end_of_the_block_before_is_taken_until_it_is_gone():
    chunk = Chunk(ptr=4096, size=4096, pool_index=0, pre_allocated=False)
    last = chunk.first.split(1024)
    assert not last.take_end_of_prev(1024)
    assert [(b.ptr, b.size) for b in chunk.blocks()] == [(4096, 2048), (6144, 2048)]
    assert last.take_end_of_prev(2048)
    assert chunk.blocks() == [last]
    assert (last.ptr, last.size, last.prev) == (4096, 4096, None)

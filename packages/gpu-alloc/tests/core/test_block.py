from gpu_alloc.core.block import Chunk


def test_split_and_absorb_keep_the_chunk_covered():
    chunk = Chunk(ptr=4096, size=4096, pool_index=0, stream=0, pre_allocated=False)
    last = chunk.first.split(1024)
    middle = chunk.first.split(512)
    assert [(b.ptr, b.size) for b in chunk.blocks()] == [(4096, 2560), (6656, 512), (7168, 1024)]
    assert last.prev is middle
    assert middle.next is last
    assert not chunk.is_idle()
    middle.absorb_next()
    chunk.first.absorb_next()
    assert [(b.ptr, b.size) for b in chunk.blocks()] == [(4096, 4096)]
    assert chunk.is_idle()


def test_absorbing_past_the_end_does_nothing():
    chunk = Chunk(ptr=0, size=512, pool_index=0, stream=0, pre_allocated=False)
    chunk.first.absorb_next()
    assert chunk.first.size == 512


def test_chunk_in_use_is_not_idle():
    chunk = Chunk(ptr=0, size=512, pool_index=0, stream=0, pre_allocated=False)
    chunk.first.is_free = False
    assert not chunk.is_idle()

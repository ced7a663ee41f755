import gc

from devicetest import fake_cuda
from unified_ckpt.devices.ring import BLOCK_BYTES, HostRing


def test_a_block_comes_back_when_nobody_holds_its_bytes() -> None:
    with fake_cuda():
        ring = HostRing()
        block = ring.take(100)
        address = block.memory.data_ptr()
        held = block.bytes_at(block.place(100), 100)
        del block
        other = ring.take(100)
        assert other.memory.data_ptr() != address
        held[:3] = b"abc"
        del held
        gc.collect()
        assert ring.take(100).memory.data_ptr() == address


def test_places_are_aligned_and_end_where_the_block_ends() -> None:
    with fake_cuda():
        block = HostRing().take(BLOCK_BYTES + 1)
        assert block.memory.is_pinned() and block.memory.numel() == BLOCK_BYTES + 1
        assert [block.place(3), block.place(64), block.place(0)] == [0, 64, 128]
        assert block.place(BLOCK_BYTES - 128 + 1) == 128
        assert block.place(1) is None

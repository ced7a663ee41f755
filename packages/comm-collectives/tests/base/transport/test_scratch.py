"""Scratch memory: reused when it is large enough, never by two callers."""

import torch

from comm_collectives.base.transport.scratch import ScratchPool

_HOST = torch.device("cpu")


def test_buffer_is_reused_for_smaller_and_slightly_larger_rows() -> None:
    pool = ScratchPool()
    first = pool.take((80, 4), torch.float32, _HOST)
    pool.give_back(first)
    for shape, dtype in (
        ((80, 4), torch.float32),
        ((10, 8), torch.float64),
        ((88, 4), torch.int32),
    ):
        again = pool.take(shape, dtype, _HOST)
        assert again.rows.shape == shape
        assert again.rows.dtype == dtype
        assert again.buffer is first.buffer
        pool.give_back(again)


def test_two_takers_get_two_buffers() -> None:
    pool = ScratchPool()
    pool.give_back(pool.take((4,), torch.uint8, _HOST))
    one, two = (pool.take((4,), torch.uint8, _HOST) for _ in range(2))
    one.rows.fill_(1)
    two.rows.fill_(2)
    assert one.rows.tolist() == [1] * 4


def test_small_buffer_gives_way_to_a_large_one() -> None:
    pool = ScratchPool()
    pool.give_back(pool.take((4,), torch.uint8, _HOST))
    large = pool.take((4000,), torch.uint8, _HOST)
    pool.give_back(large)
    assert pool.take((3,), torch.uint8, _HOST).buffer is large.buffer


def test_at_most_two_buffers_are_kept() -> None:
    pool = ScratchPool()
    taken = [pool.take((8,), torch.uint8, _HOST) for _ in range(5)]
    for scratch in taken:
        pool.give_back(scratch)
    kept = {id(scratch.buffer) for scratch in taken[:2]}
    again = [pool.take((8,), torch.uint8, _HOST) for _ in range(3)]
    assert sum(id(scratch.buffer) in kept for scratch in again) == 2


def test_no_rows_need_no_memory() -> None:
    assert ScratchPool().take((0, 5), torch.bfloat16, _HOST).rows.shape == (0, 5)

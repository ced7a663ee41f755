"""Scratch memory: reused when it is large enough, never by two callers."""

import pytest
import torch

from comm_collectives.base.transport.scratch import ScratchPool

_HOST = torch.device("cpu")


def _buffer(rows: torch.Tensor) -> int:
    return rows.untyped_storage().data_ptr()


def test_buffer_is_reused_for_smaller_and_slightly_larger_rows() -> None:
    pool = ScratchPool()
    with pool.lease(_HOST) as lease:
        first = _buffer(lease.take((80, 4), torch.float32))
    for shape, dtype in (
        ((80, 4), torch.float32),
        ((10, 8), torch.float64),
        ((88, 4), torch.int32),
    ):
        with pool.lease(_HOST) as lease:
            again = lease.take(shape, dtype)
            assert again.shape == shape
            assert again.dtype == dtype
            assert _buffer(again) == first


def test_two_takers_get_two_buffers() -> None:
    pool = ScratchPool()
    with pool.lease(_HOST) as lease:
        lease.take((4,), torch.uint8)
    with pool.lease(_HOST) as one, pool.lease(_HOST) as two:
        taken = [lease.take((4,), torch.uint8) for lease in (one, one, two)]
        assert len({_buffer(rows) for rows in taken}) == 3


def test_small_buffer_gives_way_to_a_large_one() -> None:
    pool = ScratchPool()
    with pool.lease(_HOST) as lease:
        lease.take((4,), torch.uint8)
    with pool.lease(_HOST) as lease:
        large = _buffer(lease.take((4000,), torch.uint8))
    with pool.lease(_HOST) as lease:
        assert _buffer(lease.take((3,), torch.uint8)) == large


def test_at_most_two_buffers_are_kept() -> None:
    pool = ScratchPool()
    with pool.lease(_HOST) as lease:
        taken = [lease.take((8,), torch.uint8) for _ in range(5)]
    kept = {_buffer(rows) for rows in taken}
    with pool.lease(_HOST) as lease:
        again = [lease.take((8,), torch.uint8) for _ in range(3)]
        assert sum(_buffer(rows) in kept for rows in again) == 2


def test_memory_of_a_transfer_that_failed_is_not_given_to_others() -> None:
    pool = ScratchPool()
    with pytest.raises(RuntimeError), pool.lease(_HOST) as lease:
        lost = lease.take((8,), torch.uint8)
        raise RuntimeError("gloo closed the connection")
    with pool.lease(_HOST) as lease:
        assert _buffer(lease.take((8,), torch.uint8)) != _buffer(lost)


def test_no_rows_need_no_memory() -> None:
    with ScratchPool().lease(_HOST) as lease:
        assert lease.take((0, 5), torch.bfloat16).shape == (0, 5)

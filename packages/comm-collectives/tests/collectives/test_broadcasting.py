"""broadcast: the source's tensor on every rank, whatever the receivers know of it."""

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives.broadcasting import broadcast
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from ranktest import run_ranks

_SHAPES: list[tuple[int, ...]] = [(), (3,), (0, 2), (5, 1, 4), (40, 50)]


def _bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    top = 2 if dtype == torch.bool else 256
    size = (torch.Size(shape).numel() * dtype.itemsize,)
    flat = torch.randint(0, top, size, generator=torch.Generator(), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_dtype_and_shape_arrives(world_size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        src = world_size - 1
        for dtype in DTYPES:
            for shape in _SHAPES:
                want = _bits(dtype, shape)
                got = broadcast(want if rank == src else None, src=src)
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                assert torch.equal(as_bytes(got), as_bytes(want)), (dtype, shape)

    run_ranks(fn, world_size)


@pytest.mark.parametrize("rows", [2, 400])
def test_strided_tensors_of_receivers_stay_as_they_are(rows: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        frame = torch.arange(rows * 12.0).view(rows * 2, 6) + 1000 * rank
        before = frame.clone()
        got = broadcast(frame[::2, 1::2].t(), src=1)
        source = before + 1000 * (1 - rank)
        assert torch.equal(got, source[::2, 1::2].t())
        got.zero_()
        assert torch.equal(frame, before)
        conj = broadcast(torch.full((rows,), 1 + 2j).conj() if rank == 0 else None, src=0)
        assert bool((dense(conj) == 1 - 2j).all())

    run_ranks(fn, 2)


def test_async_call_returns_the_same() -> None:
    def fn(rank: int, world_size: int) -> None:
        handles = [
            broadcast(torch.full((9,), src) if rank == src else None, src=src, async_op=True)
            for src in range(world_size)
        ]
        assert [handle.wait().tolist() for handle in handles] == [[s] * 9 for s in range(3)]

    run_ranks(fn, 3)


def test_tensors_that_differ_from_the_source_are_told_so_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        odd = [torch.ones(3, 2), torch.ones(2, 3).half(), torch.ones(2, 2), torch.ones(2, 3, 1)]
        for x in odd:
            with pytest.raises(
                MismatchError, match=r"x of rank 1 is .* rank 0, is float32\[2, 3\]"
            ):
                broadcast(x if rank == 1 else torch.ones(2, 3), src=0)
        with pytest.raises(MismatchError, match="src differs"):
            broadcast(torch.ones(2), src=rank % 2)
        assert broadcast(None if rank else torch.ones(1), src=0, device="cpu").tolist() == [1]

    run_ranks(fn, 3, timeout_s=20)


def test_mistakes_of_one_rank_end_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(RefusedTypeError, match="rank 1: x is a NoneType"):
            broadcast(None, src=1)
        with pytest.raises(RefusedTypeError, match="rank 0: x is a str"):
            broadcast("x" if rank == 0 else torch.ones(1), src=1)  # type: ignore[call-overload]
        with pytest.raises(RefusedError, match="src=2 is not a rank"):
            broadcast(torch.ones(1), src=2 if rank == 0 else 0)
        with pytest.raises(RefusedError, match="device='tpu9x' cannot be used"):
            broadcast(torch.ones(1), src=0, device="tpu9x" if rank == 1 else None)
        assert broadcast(torch.ones((1,) * 64) if rank else None, src=1).dim() == 64

    run_ranks(fn, 2, timeout_s=20)

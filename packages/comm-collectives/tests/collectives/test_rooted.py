"""gather and scatter: what each rank gave, on the rank that it was meant for."""

import pytest
import torch

from comm_collectives.base.wire import DTYPES, as_bytes, dense
from comm_collectives.collectives.rooted import gather, scatter
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from ranktest import run_ranks


def _bits(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """[rows, 3] of random bits."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    size = (rows, 3 * dtype.itemsize)
    return torch.randint(0, top, size, generator=generator, dtype=torch.uint8).view(dtype)


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(as_bytes(dense(a)), as_bytes(dense(b)))


@pytest.mark.parametrize("counts", [[2, 2], [3, 0], [0, 0], [500, 7], [0, 4, 1, 300]])
def test_rows_of_every_dtype_go_to_one_and_come_back(counts: list[int]) -> None:
    def fn(rank: int, world_size: int) -> None:
        for root in (0, world_size - 1):
            for dtype in DTYPES:
                given = [_bits(dtype, n, seed) for seed, n in enumerate(counts)]
                parts = gather(given[rank], dst=root)
                assert (parts is None) == (rank != root)
                if parts is not None:
                    assert all(map(_equal_bits, parts, given)), dtype
                assert _equal_bits(scatter(parts, src=root), given[rank]), dtype

    run_ranks(fn, len(counts))


def test_numbers_are_gathered_as_numbers() -> None:
    def fn(rank: int, world_size: int) -> object:
        parts = gather(torch.tensor(rank), dst=1)
        return None if parts is None else [(part.dim(), part.item()) for part in parts]

    assert run_ranks(fn, 3) == [None, [(0, 0), (0, 1), (0, 2)], None]


def test_scattered_tensors_may_have_any_shapes() -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 4), (2, 3, 5), (200, 1, 1, 7)]

    def fn(rank: int, world_size: int) -> None:
        tensors = [torch.full(shape, i) for i, shape in enumerate(shapes)]
        got = scatter(tensors if rank == 2 else None, src=2)
        assert torch.equal(got, tensors[rank])

    run_ranks(fn, 4)


@pytest.mark.parametrize("rows", [2, 400])
def test_inputs_may_be_strided_and_stay_as_they_are(rows: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        frame = torch.arange(rows * 12.0).view(rows * 2, 6) + 1000 * rank
        before = frame.clone()
        x = frame[::2, 1::2].t()
        parts = gather(x, dst=0)
        got = scatter([x, x.t()] if rank == 1 else None, src=1)
        theirs = before[::2, 1::2] + (0 if rank == 1 else 1000)
        assert torch.equal(got, theirs if rank == 1 else theirs.t())
        got.zero_()
        for part in parts or []:
            part.zero_()
        assert torch.equal(frame, before)

    run_ranks(fn, 2)
    run_ranks(lambda rank, world_size: scatter(gather(torch.ones(2), dst=0), src=0).tolist(), 1)


def test_async_calls_return_the_same() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.arange(4.0) + rank
        gathered = gather(x, dst=1, async_op=True)
        scattered = scatter([x, x + 5] if rank == 0 else None, src=0, async_op=True)
        parts = gathered.wait()
        assert scattered.wait().tolist() == [5 * rank + i for i in range(4)]
        if rank == 1:
            assert parts is not None
            assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [1, 2, 3, 4]]

    run_ranks(fn, 2)


_LISTS = [
    (None, RefusedTypeError, "tensors is a NoneType; give a list of tensors"),
    ([torch.ones(2)], RefusedError, "1 tensors for 2 ranks"),
    ([torch.ones(2), torch.ones(2).int()], RefusedError, "several kinds.*one dtype"),
    ([torch.ones(2), torch.eye(2).to_sparse()], RefusedTypeError, r"tensors\[1\] has layout"),
]


def test_mistakes_of_one_rank_end_the_call_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        for tensors, kind, match in _LISTS:
            with pytest.raises(kind, match=match):
                scatter(tensors if rank == 1 else [], src=1)
        with pytest.raises(RefusedError, match=r"src=2 is not a rank of a group of 2"):
            scatter([torch.ones(1)] * 2, src=0 if rank == 0 else 2)
        with pytest.raises(RefusedError, match=r"dst=-1 is not a rank"):
            gather(torch.ones(1), dst=-1)
        with pytest.raises(RefusedError, match="device='tpu9x' cannot be used"):
            scatter([torch.ones(1)] * 2, src=0, device="tpu9x" if rank == 1 else None)
        with pytest.raises(RefusedTypeError, match="rank 1: x is a list"):
            gather(torch.ones(2) if rank == 0 else [1], dst=0)  # type: ignore[call-overload]
        assert scatter([torch.ones(1)] * 2, src=0).tolist() == [1]

    run_ranks(fn, 2, timeout_s=20)


def test_ranks_that_differ_are_told_so() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(MismatchError, match="dst differs"):
            gather(torch.ones(2), dst=rank)
        with pytest.raises(MismatchError, match="src differs"):
            scatter([torch.ones(1)] * 2, src=rank)
        with pytest.raises(MismatchError, match=r"row shape=\(3,\).*row shape=\(2,\)"):
            gather(torch.ones(2, 3 - rank), dst=0)
        with pytest.raises(MismatchError, match="dims"):
            gather(torch.ones(1) if rank else torch.tensor(1.0), dst=0)

    run_ranks(fn, 2, timeout_s=20)

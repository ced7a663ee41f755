"""Reductions into given tensors, besides those in test_torch_order."""

import pytest
import torch
import torch.distributed as dist

from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError, RefusedError, RefusedTypeError
from ranktest import run_ranks


def test_only_the_root_of_a_reduce_is_written() -> None:
    def fn(rank: int, world_size: int) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
            x = torch.full((3, 2), rank + 1).to(dtype).t()
            drop_in.reduce(x, dst=1)
            assert x.tolist() == [[6 if rank == 1 else rank + 1] * 3] * 2
        drop_in.reduce(x, group_dst=0, op=dist.ReduceOp.PRODUCT)
        with pytest.raises(RefusedError, match="dst=None and group_dst=None; give one of them"):
            drop_in.reduce(x)

    run_ranks(fn, 3)


def test_ranks_that_reduce_to_different_roots_or_to_all_are_told() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2)
        with pytest.raises(MismatchError, match="dst differs between ranks"):
            drop_in.reduce(x, dst=1 - rank)
        with pytest.raises(MismatchError, match="operation differs between ranks"):
            if rank:
                drop_in.all_reduce(x)
            else:
                drop_in.reduce(x, dst=0)
        assert x.tolist() == [1, 1]

    run_ranks(fn, 2)


def test_bitwise_ops_are_those_of_torch_for_integers_and_bools() -> None:
    ops = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}

    def fn(rank: int, world_size: int) -> None:
        for name, op in ops.items():
            for dtype in (torch.int8, torch.int64, torch.uint16, torch.bool, torch.uint64):
                rows = torch.tensor([[12, 1], [10, 0], [9, 3]]).to(dtype)
                x = rows[rank].clone()
                drop_in.all_reduce(x, getattr(dist.ReduceOp, name.upper()))
                want = rows[0].to(torch.int64)
                for row in rows[1:]:
                    want = op(want, row.to(torch.int64))
                assert torch.equal(x, want.to(dtype)), (name, dtype)
            with pytest.raises(RefusedTypeError, match=f"op='{name}' is not defined for"):
                drop_in.all_reduce(torch.ones(1), name)

    run_ranks(fn, 3)


def test_lists_are_reduced_and_scattered_in_parts_of_any_size() -> None:
    def fn(rank: int, world_size: int) -> None:
        parts = [torch.arange(2.0).view(2, 1) + rank, torch.full((3,), 10.0 * rank)]
        output = torch.zeros(2, 1) if rank == 0 else torch.zeros(6)[::2]
        drop_in.reduce_scatter(output, parts)
        assert output.flatten().tolist() == ([1, 3] if rank == 0 else [10, 10, 10])
        with pytest.raises(RefusedError, match="output has 1 elements, and tensor of input_list"):
            drop_in.reduce_scatter(torch.zeros(1) if rank else torch.zeros(2), parts)

    run_ranks(fn, 2)


def test_several_tensors_are_reduced_in_place() -> None:
    def fn(rank: int, world_size: int) -> None:
        tensors = [torch.full((2,), rank), torch.full((3, 1), 1j * rank)]
        assert drop_in.all_reduce_coalesced(tensors) is None
        assert [x.flatten()[0].item() for x in tensors] == [1, 1j]
        future = drop_in.all_reduce_coalesced(tensors, async_op=True)
        assert future is not None
        assert [x.flatten()[0].item() for x in future.wait()] == [2, 2j]
        with pytest.raises(ValueError, match=r"all_reduce does not support .*MAX.* on complex"):
            drop_in.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)

    run_ranks(fn, 2)


# torch 2.11 says so of every first sparse tensor, also of one whose checks are asked for.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_are_summed_over_the_union_of_their_places() -> None:
    def fn(rank: int, world_size: int) -> None:
        def of(rank: int) -> torch.Tensor:
            places = torch.tensor([[0, rank + 1, 0]])
            return torch.sparse_coo_tensor(places, torch.ones(3, 2), (4, 2), check_invariants=True)

        x = of(rank)
        want = torch.stack([of(r).to_dense() for r in range(world_size)]).sum(0)
        drop_in.all_reduce(x)
        assert torch.equal(x.to_dense(), want)
        with pytest.raises(RefusedTypeError, match="op='max' is not defined for sparse tensors"):
            drop_in.all_reduce(x, "max")

    run_ranks(fn, 3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_sparse_tensors_that_differ_are_told_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        def of(*shape: int, dims: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype).to_sparse(dims)

        for name, x in (
            ("shape", of(5 + rank, 2)),
            ("sparse_dim", of(2, 2, dims=1 + rank)),
            ("dtype", of(2, dtype=(torch.float32, torch.int32)[rank])),
        ):
            with pytest.raises(MismatchError, match=f"{name} differs between ranks"):
                drop_in.all_reduce(x)
        with pytest.raises(MismatchError, match="sparse_dim=1"):
            drop_in.all_reduce(of(4) if rank else torch.ones(4))

    run_ranks(fn, 2)

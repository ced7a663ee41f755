"""Functions in torch's place: they are all there, nothing recurses, and torch's come back."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import comm_collectives as cc
from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError
from ranktest import run_ranks

# Torch's collectives and transfers that stay its own: built of the others, or for one backend.
_STAY = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "batch_isend_irecv", "monitored_barrier"),
    *("gather_single", "gather_into_tensor"),
}


def test_every_function_of_torch_that_sends_is_replaced_with_its_arguments() -> None:
    before = {name: getattr(dist, name) for name in distributed_c10d.__all__ if name != "reduce_op"}
    words = ("reduce", "gather", "scatter", "all_to_all", "broadcast", "barrier", "send", "recv")
    names = [n for n in before if any(word in n for word in words)]
    names = [n for n in names if inspect.isfunction(before[n]) and n not in _STAY]
    assert len(names) > 17
    with drop_in.patched_torch(), drop_in.patched_torch():
        for name in names:
            ours = getattr(dist, name)
            assert ours is not before[name], name
            assert ours is getattr(distributed_c10d, name)
        ours_of = dict(vars(drop_in))
        for name in names:
            if name in ours_of:
                theirs = list(inspect.signature(before[name]).parameters)
                got = list(inspect.signature(ours_of[name]).parameters)
                if name == "barrier" and "timeout" not in theirs:
                    got.remove("timeout")  # which torch 2.11 has not yet
                assert got == theirs, name
    assert all(getattr(dist, name) is before[name] for name in names)


def test_calls_of_torch_and_of_this_package_run_beside_each_other() -> None:
    def fn(rank: int, world_size: int) -> None:
        with drop_in.patched_torch():
            x = torch.full((4, 2), float(rank)).t()  # strided: torch's own would be wrong
            dist.all_reduce(x)
            assert (x == 3).all()
            dist.broadcast(x, src=0)
            large = torch.full((300_000,), rank)
            dist.all_reduce(large, op=dist.ReduceOp.MAX)
            assert (large == 2).all()
            assert (cc.all_reduce(large) == 6).all()
            assert cc.all_gather(large[:2]).numel() == 6
            objects: list[object] = [None] * world_size
            dist.all_gather_object(objects, {"rank": rank})
            assert objects == [{"rank": r} for r in range(world_size)]
            told: list[object] = [("x", 1) if rank == 1 else None]
            dist.broadcast_object_list(told, src=1)
            assert told == [("x", 1)]
            got: list[object] = [None]
            dist.scatter_object_list(got, [[r] for r in range(world_size)], src=0)
            assert got == [[rank]]
            work = dist.all_gather_into_tensor(torch.zeros(6), torch.ones(2), async_op=True)
            work.wait()
            part = dist.new_group([0, 1])
            if rank < 2:
                dist.barrier(group=part)
        dist.all_reduce(torch.ones(1))
        dist.barrier()

    run_ranks(fn, 3)


def test_a_replaced_function_compares_calls() -> None:
    def fn(rank: int, world_size: int) -> None:
        with drop_in.patched_torch(), pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(2 + rank))

    run_ranks(fn, 2)

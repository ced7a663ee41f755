"""Functions in torch's place: they are all there, nothing recurses, and torch's come back."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import comm_collectives as cc
from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError
from comm_collectives.shm.registration import register_backends
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


@pytest.mark.parametrize("backend", ["gloo", "comm_shm"])
def test_functions_in_torchs_place_serve_the_parts_of_a_split_group(backend: str) -> None:
    if backend == "comm_shm" and not backends_may_be_python():
        pytest.skip("this torch has no backends written in Python")

    def fn(rank: int, world_size: int) -> bool:
        register_backends()
        whole = dist.new_group(backend=backend)
        with drop_in.patched_torch():
            try:
                part = dist.split_group(whole, [[2, 0], [1, 3]])
            except RuntimeError as error:
                assert "No device associated with the default pg" in str(error)
                return False
            assert part is not None
            x, other = torch.tensor([float(rank)]), {2: 0, 0: 2, 1: 3, 3: 1}[rank]
            work = dist.all_reduce(x, group=part, async_op=True)
            work.wait()
            assert work.is_completed()
            assert x.item() == rank + other
            got = torch.zeros(1)
            sent = dist.isend(torch.tensor([10.0 * rank]), other, part)
            assert dist.recv(got, other, part) == other
            sent.wait()
            assert got.item() == 10 * other
            objects: list[object] = [None] * 2
            dist.all_gather_object(objects, rank, group=part)
            assert sorted(objects) == sorted([rank, other])  # type: ignore[type-var]
            with pytest.raises(MismatchError):
                dist.all_reduce(torch.ones(2 + dist.get_rank(part)), group=part)
            dist.barrier(group=whole)
        return True

    if not all(run_ranks(fn, 4)):
        pytest.skip("this torch splits only groups that are bound to a device")


def test_a_replaced_function_compares_calls() -> None:
    def fn(rank: int, world_size: int) -> None:
        with drop_in.patched_torch(), pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(2 + rank))

    run_ranks(fn, 2)


def test_calls_that_torch_gathers_have_ended_when_its_manager_was_waited_for() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.new_group()
        with drop_in.patched_torch():
            x, y, z = (torch.ones(2) for _ in range(3))
            with distributed_c10d._coalescing_manager(async_ops=True) as manager:
                dist.all_reduce(x, async_op=True)
                with pytest.raises(MismatchError):  # calls of other groups are compared
                    dist.all_reduce(torch.ones(1 + rank), group=group)
                dist.all_reduce(y, async_op=True)
            assert len(manager.works) == 1
            manager.wait()
            assert x.tolist() == y.tolist() == [2, 2]
            with distributed_c10d._coalescing_manager(group):
                dist.all_reduce(z, dist.ReduceOp.SUM, group)
            assert z.tolist() == [2, 2]

    run_ranks(fn, 2)


def test_programs_of_torch_and_barriers_come_from_several_lines() -> None:
    def fn(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        with drop_in.patched_torch():
            stage = PipelineStage(torch.nn.Linear(3, 3), rank, world_size, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, 2)
            if rank == 0:  # as torch's own documentation has it
                schedule.step(torch.ones(4, 3))
                dist.barrier()
            else:
                assert schedule.step().shape == (4, 3)
                dist.barrier()
            with pytest.raises(MismatchError, match="call site differs"):
                if rank == 0:
                    dist.all_reduce(torch.ones(1))
                else:
                    dist.all_reduce(torch.ones(1))

    run_ranks(fn, 2)

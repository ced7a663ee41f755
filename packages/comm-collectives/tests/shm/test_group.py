"""Groups of comm_shm keep what torch promises of handles, parts of groups and batches."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from comm_collectives._torch_private import backends_may_be_python
from comm_collectives.errors import CommValueError, MismatchError
from comm_collectives.shm.group import ShmGroup
from comm_collectives.shm.registration import register_backends
from ranktest import run_ranks

pytestmark = pytest.mark.skipif(
    not backends_may_be_python(), reason="this torch has no backends written in Python"
)
NAMES = ["comm_shm", "cpu:comm_shm,cuda:gloo"]


def _new(name="comm_shm", **options):
    register_backends()
    return dist.new_group(backend=name, **options)


def test_handles_are_completed_once_the_call_has_ended():
    def fn(rank, size):
        group = _new()
        assert isinstance(group, ShmGroup)
        store = dist.distributed_c10d._get_default_store()
        x = torch.full((4,), rank + 1.0)
        if rank:
            store.wait(["looked"], timedelta(seconds=60))
        work = dist.all_reduce(x, group=group, async_op=True)
        before = rank == 0 and work.is_completed()
        store.set("looked", "yes")
        deadline = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        return before, work.is_completed(), work.is_success(), x.tolist()

    assert run_ranks(fn, 2) == [(False, True, True, [3.0] * 4)] * 2


def test_every_collective_returns_its_own_handle():
    def fn(rank, size):
        group = _new()
        x, many = torch.ones(2), torch.ones(4)
        works = [
            dist.broadcast(x, 0, group=group, async_op=True),
            dist.reduce(x, 0, group=group, async_op=True),
            dist.all_gather([torch.ones(2), torch.ones(2)], x, group=group, async_op=True),
            dist.all_gather_into_tensor(many, x, group=group, async_op=True),
            dist.gather(
                x, [x.clone(), x.clone()] if rank == 0 else None, group=group, async_op=True
            ),
            dist.scatter(
                x, [x.clone(), x.clone()] if rank == 0 else None, group=group, async_op=True
            ),
            dist.reduce_scatter(x, [torch.ones(2), torch.ones(2)], group=group, async_op=True),
            dist.reduce_scatter_tensor(x, torch.ones(4), group=group, async_op=True),
            dist.all_to_all_single(many, torch.ones(4), group=group, async_op=True),
            dist.all_to_all([torch.ones(1)] * 2, [torch.ones(1)] * 2, group=group, async_op=True),
            dist.barrier(group=group, async_op=True),
        ]
        for work in works:
            work.wait()
        return [work.is_completed() for work in works]

    assert run_ranks(fn, 2) == [[True] * 11] * 2


def test_transfers_and_refused_calls_are_completed_once_they_have_ended():
    def fn(rank, size):
        group = _new()
        x = torch.full((3,), float(rank))
        if rank == 0:
            work = dist.irecv(x, 1, group=group)
            before = work.is_completed()
            dist.barrier(group=group)
        else:
            dist.barrier(group=group)
            before, work = False, dist.isend(x, 0, group=group)
        work.wait()
        refused = dist.all_reduce(torch.ones(2 + rank), group=group, async_op=True)
        with pytest.raises(MismatchError):
            refused.wait()
        ends = refused.is_completed(), refused.is_success(), type(refused.exception())
        return before, work.is_completed(), x.tolist(), ends

    ends = (True, False, MismatchError)
    assert run_ranks(fn, 2) == [(False, True, [1.0] * 3, ends)] * 2


def test_receiving_from_any_rank_tells_the_source():
    def fn(rank, size):
        group = _new()
        if rank:
            dist.send(torch.full((2,), float(rank)), 0, group=group)
            return None
        got = {}
        for _ in range(size - 1):
            x = torch.empty(2)
            src = dist.recv(x, group=group)
            got[src] = x.tolist()
        return got

    assert run_ranks(fn, 3)[0] == {1: [1.0, 1.0], 2: [2.0, 2.0]}


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_sends_and_receives(name):
    def fn(rank, size):
        group = _new(name)
        x, y = torch.arange(4.0) + rank, torch.empty(4)
        ops = [
            dist.P2POp(dist.isend, x, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, y, (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return y.tolist()

    got = run_ranks(fn, 3)
    assert got == [[float(i + (rank - 1) % 3) for i in range(4)] for rank in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_can_be_split(name):
    def fn(rank, size):
        group = _new(name)
        part = dist.split_group(group, [[2, 0], [1]])
        x = torch.tensor([rank + 1.0])
        work = dist.all_reduce(x, group=part, async_op=True)
        work.wait()
        shares = part._get_backend(torch.device("cpu")).shares_memory
        return x.item(), dist.get_rank(part), shares, type(part) is type(group)

    first, second, third = run_ranks(fn, 3)
    assert first == (4.0, 1, True, True)
    assert third == (4.0, 0, True, True)
    assert second == (2.0, 0, False, True)


def test_a_rank_in_no_part_gets_no_group_or_an_error():
    def fn(rank, size):
        alone = dist.split_group(_new(), [[1]])
        is_kept_out = alone is dist.GroupMember.NON_GROUP_MEMBER
        mixed = _new(NAMES[1])
        if rank == 1:
            return is_kept_out, dist.get_world_size(dist.split_group(mixed, [[1]]))
        with pytest.raises(CommValueError, match="one more part"):
            dist.split_group(mixed, [[1]])
        return is_kept_out, 0

    assert run_ranks(fn, 2) == [(True, 0), (False, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_monitored_barrier_names_the_absent(name):
    def fn(rank, size):
        group = _new(name)
        dist.monitored_barrier(group)
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as caught:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
        return str(caught.value)

    assert "rank 1" in run_ranks(fn, 2)[0].lower()

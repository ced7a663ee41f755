"""Calls in the terms of torch's Work."""

from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups import group_state
from comm_collectives.call.handles import Handle
from comm_collectives.call.handles.watch import Watch
from comm_collectives.collectives import drop_in
from comm_collectives.collectives.drop_in.works import CallWork
from comm_collectives.errors import MismatchError, RefusedTypeError
from ranktest import run_ranks


def test_a_work_is_what_torchs_is() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.full((3,), float(rank))
        work = drop_in.all_reduce(x, async_op=True)
        assert isinstance(work, dist.Work)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert doubled.wait().tolist() == [2, 2, 2]
        work = drop_in.all_reduce(torch.ones(2 + rank), async_op=True)
        assert work is not None
        future = work.get_future()
        with pytest.raises(MismatchError):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
        with pytest.raises(MismatchError):
            future.wait()

    run_ranks(fn, 2)


def test_input_and_output_may_be_parts_of_one_memory() -> None:
    def fn(rank: int, world_size: int) -> None:
        memory = torch.tensor([0.0, 0, 0, 0, rank + 1, rank + 1])
        work = drop_in.all_gather_into_tensor(memory[:4], memory[4:], async_op=True)
        assert work is not None
        work.wait()
        assert memory.tolist() == [1, 1, 2, 2, rank + 1, rank + 1]
        handle = cc.all_reduce(memory[:4], async_op=True)
        memory[4:].fill_(5)
        assert handle.wait().tolist() == [2, 2, 4, 4]

    run_ranks(fn, 2)


@pytest.mark.parametrize("waits_for_future", [True, False])
def test_a_call_in_the_callback_of_another_can_be_waited_for_there(waits_for_future: bool) -> None:
    def fn(rank: int, world_size: int) -> None:
        def again(future: "torch.futures.Future[list[torch.Tensor]]") -> torch.Tensor:
            work = drop_in.all_reduce(future.value()[0], async_op=True)
            assert work is not None
            if waits_for_future:
                return work.get_future().wait()[0]
            work.wait()
            return future.value()[0]

        x, later = torch.ones(2), torch.ones(1)
        work = drop_in.all_reduce(x, async_op=True)
        assert work is not None
        future = work.get_future().then(again)
        other = drop_in.all_reduce(later, async_op=True)
        assert other is not None
        other.wait()
        assert later.item() == 2
        assert future.wait().tolist() == [4, 4]

    run_ranks(fn, 2, timeout_s=20)


@pytest.mark.parametrize("limit", [None, timedelta(seconds=10)])
def test_a_call_that_was_made_before_can_be_waited_for_in_a_callback(
    limit: timedelta | None,
) -> None:
    def fn(rank: int, world_size: int) -> None:
        x, later, last = torch.ones(2), torch.ones(1), torch.ones(1)

        def both(future: "torch.futures.Future[list[torch.Tensor]]") -> torch.Tensor:
            work.wait(*[limit] if limit else [])
            return future.value()[0] + later

        with group_state(None).lock:  # none of them can begin
            first = drop_in.all_reduce(x, async_op=True)
            assert first is not None
            future = first.get_future().then(both)
            work = drop_in.all_reduce(later, async_op=True)
            assert work is not None
            drop_in.all_reduce(last, async_op=True)
        assert future.wait().tolist() == [4, 4]
        drop_in.all_reduce(last)
        assert last.item() == 4

    run_ranks(fn, 2, timeout_s=20)


@pytest.mark.parametrize("error", [TypeError("of a kind"), KeyboardInterrupt("by hand")])
def test_a_future_ends_with_every_kind_of_error(error: BaseException) -> None:
    failed: Future[object] = Future()
    failed.set_exception(error)
    work = CallWork(Handle("all_reduce", failed, Watch(())), [])  # type: ignore[arg-type]
    future = work.get_future()
    assert future.done()
    with pytest.raises(type(error) if isinstance(error, Exception) else RuntimeError) as raised:
        future.wait()
    assert str(error) in str(raised.value)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_a_future_has_a_sparse_sum_as_well() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (3,))
        work = drop_in.all_reduce(x, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0].to_dense().tolist() == [1, 1, 0]

    run_ranks(fn, 2)


def test_a_limit_that_is_no_timedelta_is_refused_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(RefusedTypeError, match=r"rank 0: timeout=3\.0; give a datetime"):
            drop_in.barrier(timeout=3.0 if rank == 0 else None)  # type: ignore[arg-type]

    run_ranks(fn, 2)

"""Asynchronous calls: in order, with their inputs kept alive and watched; failures at `wait`."""

import gc
import math
import threading
import time
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups.groups import GroupState, group_state
from comm_collectives.call.handles import debug_mode
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommTypeError,
    CommValueError,
    MismatchError,
    MutatedInputError,
    RefusedTypeError,
)
from ranktest import mark, run_ranks, until_marked


def test_handle_returns_the_result_again_and_again() -> None:
    def fn(rank: int, world_size: int) -> None:
        handle = cc.all_reduce(torch.full((3000,), rank + 1.0), async_op=True)
        assert isinstance(handle, cc.Handle)
        assert handle.wait().unique().tolist() == [3.0]
        assert handle.is_done()
        assert handle.wait() is handle.wait()

    run_ranks(fn, 2)


def test_start_does_not_wait_for_the_others() -> None:
    def fn(rank: int, world_size: int) -> None:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            until_marked("started")
        handle = cc.all_to_all(torch.full((2,), rank), async_op=True)
        assert not handle.is_done() or rank == 1
        mark("started")
        assert handle.wait().tolist() == [0, 1]

    run_ranks(fn, 2)


def test_synchronous_call_waits_its_turn_behind_asynchronous_ones() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        handles = [cc.all_reduce(torch.full((500,), float(i)), async_op=True) for i in range(4)]
        last = cc.all_reduce(torch.full((500,), 10.0))
        state = group_state(None)
        assert all(handle.is_done() for handle in handles)
        assert state.next_call() == 6
        return [*(float(h.wait()[0]) for h in handles), float(last[0])]

    assert run_ranks(fn, 2) == [[0.0, 2.0, 4.0, 6.0, 20.0]] * 2


def test_input_stays_alive_without_its_owner() -> None:
    def fn(rank: int, world_size: int) -> float:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(0.3)
        x = torch.full((100_000,), 1.0 + rank)
        handle = cc.all_reduce(x, async_op=True)
        del x
        gc.collect()
        torch.full((100_000,), float("nan"))  # would land in the freed memory
        return float(handle.wait().sum())

    assert run_ranks(fn, 2) == [300_000.0] * 2


def test_input_changed_before_wait_is_an_error() -> None:
    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(3000)
        handle = cc.all_reduce(x, async_op=True)
        x.add_(1)
        with pytest.raises(MutatedInputError, match="all_reduce: input 0 was changed in place"):
            handle.wait()

    run_ranks(fn, 2)


def test_input_changed_behind_torch_is_an_error_in_debug_mode() -> None:
    def fn(rank: int, world_size: int) -> None:
        array = np.ones(3000, dtype=np.float32)
        with debug_mode():
            handle = cc.all_reduce(torch.from_numpy(array), async_op=True)
        array += 1
        with pytest.raises(MutatedInputError):
            handle.wait()

    run_ranks(fn, 2)


def test_failure_comes_at_wait_and_names_the_call() -> None:
    def fn(rank: int, world_size: int) -> str:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            until_marked("gave up")
            return ""
        handle = cc.all_reduce(torch.ones(1), timeout_s=0.3, async_op=True)
        with pytest.raises(CollectiveTimeoutError) as caught:
            handle.wait()
        mark("gave up")
        return str(caught.value)

    text = run_ranks(fn, 2)[0]
    assert "rank 0: all_reduce call 2 of group (0, 1) timed out" in str(text)
    assert "did not arrive: rank 1" in str(text)


def test_limit_of_a_wait_leaves_the_call_under_way() -> None:
    def fn(rank: int, world_size: int) -> float:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            until_marked("waits again")
        handle = cc.all_reduce(torch.ones(1), async_op=True)
        if rank == 0:
            said = r"still under way after 0\.4 s; did not arrive: rank 1; wait again"
            with pytest.raises(CollectiveTimeoutError, match=said):
                handle.wait(0.4)
            mark("waits again")
        return float(handle.wait())

    assert run_ranks(fn, 2) == [2.0, 2.0]


def test_limit_of_a_wait_that_is_no_time_is_refused() -> None:
    def fn(rank: int, world_size: int) -> float:
        handle = cc.all_reduce(torch.ones(1), async_op=True)
        for limit in (math.inf, math.nan, -1.0):
            with pytest.raises(CommValueError, match="must be positive"):
                handle.wait(limit)
        with pytest.raises(CommTypeError, match="is a str; give seconds"):
            handle.wait("1")  # type: ignore[arg-type]
        with suppress(CollectiveTimeoutError):
            handle.wait(0)
        return float(handle.wait(Fraction(10)))  # type: ignore[arg-type]

    assert run_ranks(fn, 2) == [2.0, 2.0]


def test_asynchronous_call_is_differentiable() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        x = torch.full((2, 500), 1.0 + rank, requires_grad=True)
        y = cc.all_to_all(x, async_op=True).wait()
        (y * (1 + rank)).sum().backward()
        return [float(row[0]) for row in x.grad]

    assert run_ranks(fn, 2) == [[1.0, 2.0]] * 2


def test_site_of_an_asynchronous_call_is_the_callers_line() -> None:
    def fn(rank: int, world_size: int) -> str:
        x = torch.ones(4 - rank, 3)
        handle = cc.all_reduce(x, async_op=True)
        with pytest.raises(MismatchError) as caught:
            handle.wait()
        return str(caught.value)

    for text in run_ranks(fn, 2):
        assert str(text).count("test_handles.py:") == 2


def test_other_threads_run_while_a_call_waits() -> None:
    def fn(rank: int, world_size: int) -> int:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(1.0)
        counted = [0]
        done = threading.Event()

        def count() -> None:
            while not done.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        cc.all_reduce(torch.ones(100_000))
        done.set()
        thread.join()
        return counted[0]

    assert run_ranks(fn, 2)[0] > 10_000


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_input_that_cannot_be_watched_is_refused_on_every_rank(kind: str) -> None:
    """What an asynchronous call does with its inputs beforehand must not part the ranks."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(3)
        odd = x.to("meta") if kind == "meta" else x.to_sparse()
        with debug_mode():
            handle = cc.all_gather(odd if rank else x, timeout_s=10, async_op=True)
        with pytest.raises(RefusedTypeError, match="rank 1: x has layout"):
            handle.wait()

    run_ranks(fn, 2, timeout_s=30)


@pytest.mark.parametrize("shares", [True, False], ids=["one host", "across hosts"])
def test_asynchronous_calls_stand_beside_raw_torch_calls_of_the_group(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupState, "may_share_memory", shares)

    def fn(rank: int, world_size: int) -> None:
        for i in range(10):
            x, raw = torch.full((3000,), float(i)), torch.ones(3000)
            handle = cc.all_reduce(x, async_op=True)
            # One rank's thread starts the call before the raw one, the other's after it.
            time.sleep(0.02 * ((rank + i) % 2))
            dist.all_reduce(raw)
            assert torch.equal(handle.wait(), x * world_size)
            assert torch.equal(raw, torch.full((3000,), float(world_size)))

    run_ranks(fn, 2, timeout_s=60)

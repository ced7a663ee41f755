"""What a rank knows of a group: numbers, places, devices."""

import gc
import math
import os
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups import groups
from comm_collectives.call.groups.groups import GroupState, group_state
from comm_collectives.errors import RefusedError, RefusedTypeError
from ranktest import run_ranks


def test_calls_are_numbered_per_group_and_transfers_per_direction() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        other = dist.new_group([0, 1])
        cc.all_reduce(torch.ones(1))
        cc.all_reduce(torch.ones(1))
        cc.all_reduce(torch.ones(1), group=other)
        world = group_state(None)
        second = group_state(other)
        return [world.next_call(), second.next_call()]

    assert run_ranks(fn, 2) == [[3, 2]] * 2


def test_state_stays_with_its_group() -> None:
    def fn(rank: int, world_size: int) -> None:
        assert group_state(None) is group_state(dist.group.WORLD)

    run_ranks(fn, 1)


def test_gloo_carries_everything_through_the_host() -> None:
    def fn(rank: int, world_size: int) -> None:
        state = group_state(None)
        assert state.control_type == "cpu"
        assert [state.transport_type(torch.device(d)) for d in ("cpu", "cuda", "mps")] == [
            "cpu"
        ] * 3

    run_ranks(fn, 1)


def test_non_member_is_told_so() -> None:
    def fn(rank: int, world_size: int) -> None:
        group = dist.new_group([0])
        dist.barrier()
        if rank == 1:
            with pytest.raises(ValueError, match="of which this rank is a member"):
                cc.all_reduce(torch.ones(1), group=group)

    run_ranks(fn, 2)


def test_rank_that_is_no_integer_is_refused_on_every_rank() -> None:
    """A rank that comes of a division is a float, which no frame can hold."""

    def fn(rank: int, world_size: int) -> None:
        x = torch.ones(2)
        with pytest.raises(RefusedTypeError, match=r"rank 1: src=0.0 is a float; give an int"):
            cc.broadcast(x, src=0.0 if rank else 0, timeout_s=10)  # type: ignore[call-overload]
        with pytest.raises(RefusedTypeError, match=r"rank 0: src=0.5 is a float"):
            cc.scatter([x, x], src=0 if rank else 0.5, timeout_s=10)  # type: ignore[call-overload]
        with pytest.raises(RefusedTypeError, match=r"rank 0: src=None is a NoneType"):
            cc.broadcast_nested(x, src=0 if rank else None, timeout_s=10)  # type: ignore[call-overload]
        with pytest.raises(RefusedTypeError, match=r"rank 0: dst=1.0 is a float"):
            cc.gather(x, dst=1 if rank else 1.0, timeout_s=10)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"dst=0.5 is a float; give an int"):
            cc.send(x, dst=0.5)  # type: ignore[call-overload]
        with pytest.raises(RefusedTypeError, match=r"is a Tensor; give an int"):
            cc.broadcast(x, src=torch.tensor(0.0) if rank else 0, timeout_s=10)  # type: ignore[call-overload]
        for src in (np.int64(1), torch.tensor(1)):
            assert cc.broadcast(x, src=src).tolist() == [1, 1]  # type: ignore[call-overload]

    run_ranks(fn, 2)


@pytest.mark.parametrize("shares", [True, False])
def test_child_that_is_forked_takes_no_part_in_the_groups_of_its_parent(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read, in shared memory, what its parent then takes for its own."""
    monkeypatch.setattr(GroupState, "may_share_memory", shares)

    def fn(rank: int, world_size: int) -> list[float]:
        cc.all_reduce(torch.zeros(1))

        child = os.fork()
        if not child:
            with suppress(BaseException):
                for call in (cc.all_reduce, lambda x: cc.send(x, dst=1 - rank)):
                    with pytest.raises(cc.CommError, match="of which this one was forked"):
                        call(torch.ones(1))
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
        return cc.all_reduce(torch.full((1,), 5.0)).tolist()

    assert run_ranks(fn, 2) == [[10], [10]]


@pytest.mark.parametrize(
    ("limit", "kind", "text"),
    [
        ("3", RefusedTypeError, "timeout_s='3' is a str; give seconds"),
        (timedelta(seconds=3), RefusedTypeError, "is a timedelta; give seconds"),
        (math.inf, RefusedError, "timeout_s=inf must be positive"),
        (math.nan, RefusedError, "timeout_s=nan must be positive"),
    ],
)
def test_limit_that_is_no_time_is_refused_on_every_rank(
    limit: object, kind: type[cc.CommError], text: str
) -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(kind, match=re.escape(text)):
            cc.all_reduce(torch.ones(1), timeout_s=limit if rank else 10.0)  # type: ignore[call-overload]
        with pytest.raises((TypeError, ValueError), match=re.escape(text)):
            cc.recv(src=1 - rank, timeout_s=limit)  # type: ignore[call-overload]

    run_ranks(fn, 2, timeout_s=30)


def test_threads_that_use_a_group_first_at_once_find_one_state() -> None:
    def fn(rank: int, world_size: int) -> int:
        sys.setswitchinterval(1e-6)
        for _ in range(50):
            groups._STATES.clear()
            start, found = threading.Barrier(8), []

            def use(start: threading.Barrier = start, found: list[object] = found) -> None:
                start.wait()
                found.append(group_state(None))

            threads = [threading.Thread(target=use) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len({id(state) for state in found}) == 1
        return 0

    run_ranks(fn, 1)


@pytest.mark.parametrize("kind", ["async", "backward", "sent", "let go"])
def test_nothing_outlives_a_group(kind: str) -> None:
    """Threads and connections end with the group; each group of a program has its own."""

    def use(group: dist.ProcessGroup, rank: int) -> None:
        x = torch.ones(3000, requires_grad=True)
        if kind == "async":
            cc.all_reduce(x.detach(), group=group, async_op=True).wait()
        elif kind == "backward":
            cc.all_reduce(x, group=group).sum().backward()
        elif rank == 0:
            cc.send(x, dst=1, group=group, async_op=True).wait().sum().backward()
        else:
            y = cc.recv(src=0, group=group, async_op=True).wait()
            if kind == "sent":
                y.sum().backward()

    def fn(rank: int, world_size: int) -> None:
        def held() -> tuple[int, int]:
            gc.collect()
            return threading.active_count(), len(os.listdir("/proc/self/fd"))

        dist.barrier()
        before = held()
        group = dist.new_group([0, 1])
        use(group, rank)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        deadline_s = time.monotonic() + 10
        while held() != before and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert held() == before

    run_ranks(fn, 2)

"""Ranks that wait for each other in a circle are told so, and nobody who is merely late."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups import GroupState, group_state
from comm_collectives.call.pairs import Lane, Questions
from comm_collectives.collectives import drop_in
from comm_collectives.errors import CollectiveTimeoutError, MismatchError
from ranktest import (
    can_leave_shared_memory,
    leave_shared_memory,
    more_than_sockets_hold,
    run_ranks,
)

_LARGE = more_than_sockets_hold() // 4  # floats that find no room under way
_LIMIT_S = 60.0  # of the group


def _take_by_tag(rank: int, after: int) -> None:
    work = drop_in.irecv(torch.zeros(1), after, tag=3)
    assert work is not None
    work.wait()


_CIRCLES: dict[str, Callable[[int, int], object]] = {
    "receives": lambda rank, after: cc.recv(src=after),
    "large sends": lambda rank, after: cc.send(torch.ones(_LARGE), dst=after),
    "a send among receives": lambda rank, after: (
        cc.send(torch.ones(_LARGE), dst=after) if rank == 1 else cc.recv_tensors(src=after)
    ),
    "asynchronous receives": lambda rank, after: cc.recv(src=after, async_op=True).wait(),
    "drop-in receives": _take_by_tag,
}


def _go_on(rank: int, world_size: int) -> None:
    """Calls and transfers of all ranks, which are right."""
    assert cc.all_reduce(torch.ones(1)).item() == world_size
    handle = cc.send(torch.tensor([rank]), dst=(rank + 1) % world_size, async_op=True)
    before = (rank - 1) % world_size
    assert cc.recv(src=before).item() == before
    handle.wait()


@pytest.mark.parametrize("size", [3, 4])
def test_a_circle_of_transfers_is_named_on_all_its_ranks_and_they_go_on(size: int) -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        texts = []
        _go_on(rank, world_size)
        for name, wait in _CIRCLES.items():
            started = time.monotonic()
            with pytest.raises(MismatchError, match=f"{world_size} ranks wait for each") as caught:
                wait(rank, (rank + 1) % world_size)
            took_s = time.monotonic() - started
            assert took_s < _LIMIT_S / 3, f"{name}: {took_s} s"
            assert str(caught.value).count("test_questions.py") == world_size + 1, caught.value
            _go_on(rank, world_size)
            texts.append(f"{name} {took_s:.2f} s")
        return texts

    run_ranks(fn, size, timeout_s=_LIMIT_S)


def test_who_is_late_and_who_waits_for_a_circle_is_in_none() -> None:
    def fn(rank: int, world_size: int) -> None:
        cc.all_reduce(torch.ones(1))
        # A chain: 0 waits for 1, that for 2, and that for 3, which comes late.
        if rank == 3:
            time.sleep(2.5)
        else:
            assert cc.recv(src=rank + 1).item() == 7
        if rank:
            cc.send(torch.tensor(7), dst=rank - 1)
        # A circle of 0, 1 and 2; 3 waits for 0, which sends after its error.
        if rank == 3:
            assert cc.recv(src=0).item() == 8
        else:
            with pytest.raises(MismatchError, match="3 ranks wait for each other"):
                cc.recv(src=(rank + 1) % 3)
        if rank == 0:
            time.sleep(1.0)
            cc.send(torch.tensor(8), dst=3)
        # Two receives of each rank, of which the second is served late.
        others = [cc.recv(src=peer, async_op=True) for peer in range(4) if peer != rank]
        time.sleep(1.2 if rank == 1 else 0)
        handles = [cc.isend_tensors([torch.ones(1)], dst=p) for p in range(4) if p != rank]
        for handle in handles:
            handle.wait()
        assert all(other.wait().item() == 1 for other in others)
        assert cc.all_reduce(torch.ones(1)).item() == 4

    run_ranks(fn, 4, timeout_s=_LIMIT_S)


def test_a_transfer_against_an_asynchronous_call_is_named_once_the_program_waits_for_it() -> None:
    def total() -> cc.Handle[torch.Tensor]:
        return cc.all_reduce(torch.ones(1), async_op=True)

    def fn(rank: int, world_size: int) -> float:
        total().wait()
        started = time.monotonic()
        if rank == 1:  # not while it computes
            handle = total()
            time.sleep(1.5)
            cc.send(torch.ones(1), dst=0)
        else:
            cc.recv(src=1)
            handle = total()
        handle.wait()
        with pytest.raises(MismatchError, match="the two ranks wait for each other"):
            if rank == 1:
                total().wait()
            else:
                cc.recv(src=1)
        _go_on(rank, world_size)
        return time.monotonic() - started

    assert max(run_ranks(fn, 2, timeout_s=_LIMIT_S)) < _LIMIT_S / 2


def test_a_rank_counts_the_call_that_its_transfer_ended_though_another_thread_looks_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heed = Questions.heed

    def heed_meanwhile(questions: Questions, *args: Any) -> MismatchError | None:
        is_held, state = threading.Event(), group_state(None)

        def look_around() -> None:  # as who answers for dropped graphs, but for longer
            with state.lock:
                is_held.set()
                time.sleep(0.3)

        looks = threading.Thread(target=look_around)
        looks.start()
        is_held.wait()
        try:
            return heed(questions, *args)
        finally:
            looks.join()

    def fn(rank: int, world_size: int) -> None:
        _go_on(rank, world_size)
        if rank == 0:
            monkeypatch.setattr(Questions, "heed", heed_meanwhile)
        with pytest.raises(MismatchError, match="the two ranks wait for each other"):
            cc.recv(src=1) if rank == 0 else cc.all_reduce(torch.ones(2))
        _go_on(rank, world_size)

    run_ranks(fn, 2, timeout_s=_LIMIT_S)


_LINKS: dict[str, Callable[[int, dist.ProcessGroup], object]] = {
    "receive": lambda after, group: cc.recv(src=after, group=group),
    "large send": lambda after, group: cc.send(torch.ones(_LARGE), dst=after, group=group),
    "call": lambda after, group: cc.all_reduce(torch.ones(2), group=group),
    "large call": lambda after, group: cc.all_to_all(torch.ones(_LARGE), group=group),
    "asynchronous call": lambda after, group: cc.all_reduce(
        torch.ones(2), group=group, async_op=True
    ).wait(),
}


def _circle_of_groups(kinds: tuple[str, ...], rank: int, groups: list[dist.ProcessGroup]) -> float:
    """Rank i waits for the next one in group i, by link i; return for how long."""
    size, started = len(kinds), time.monotonic()
    after = (rank + 1) % size
    of_group = dist.get_process_group_ranks(groups[rank])
    with pytest.raises(MismatchError, match="wait for each other in") as caught:
        _LINKS[kinds[rank]](of_group.index(after), groups[rank])
    took_s = time.monotonic() - started
    text = str(caught.value)
    assert text.startswith((f"rank {rank}: ", "all_"))
    assert text.count("test_questions.py") >= size, text
    assert f"({groups[rank].group_name!r})" in text, text
    assert all(f"rank {i}: " in text for i in range(size)), text
    assert took_s < _LIMIT_S / 3, f"{kinds}: {took_s} s"
    for group in groups:
        if isinstance(group, dist.ProcessGroup):  # of which this rank is a member
            assert cc.all_reduce(torch.ones(1), group=group).item() == 2
    return took_s


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_circle_over_groups_is_named_on_all_its_ranks_and_all_groups_go_on(
    size: int, shares_memory: bool
) -> None:
    if not shares_memory and not can_leave_shared_memory():
        pytest.skip("this system makes no namespaces")
    rng = random.Random(size)
    names = list(_LINKS)
    kinds = [(name,) * size for name in names]
    kinds += [tuple(rng.choice(names) for _ in range(size)) for _ in range(3)]

    def fn(rank: int, world_size: int) -> None:
        if not shares_memory:
            leave_shared_memory()
        pairs = [sorted((i, (i + 1) % size)) for i in range(size)]
        groups = [dist.new_group(pair) for pair in pairs]
        for each in kinds:  # the first of them is the first use of the groups
            _circle_of_groups(each, rank, groups)

    run_ranks(fn, size, timeout_s=_LIMIT_S)


def test_ranks_of_a_call_that_are_in_no_circle_hear_that_others_left_it() -> None:
    def fn(rank: int, world_size: int) -> None:
        one, two = dist.new_group(), dist.new_group([0, 1])
        for _ in range(2):
            with pytest.raises(MismatchError, match="the two ranks wait for each other"):
                cc.all_reduce(torch.ones(2), group=two if rank == 1 else one)
            assert cc.all_reduce(torch.ones(1), group=one).item() == 3
            if rank < 2:
                assert cc.all_reduce(torch.ones(1), group=two).item() == 2

    run_ranks(fn, 3, timeout_s=_LIMIT_S)


def test_all_ranks_that_wait_crosswise_in_two_groups_hear_of_it_and_both_groups_go_on() -> None:
    def fn(rank: int, world_size: int) -> None:
        groups = dist.new_group(), dist.new_group()
        for _ in range(2):
            with pytest.raises(MismatchError, match="wait for each other"):
                cc.all_reduce(torch.ones(2), group=groups[rank % 2])
            for group in groups:
                assert _sum_of_ones(group) == 4

    run_ranks(fn, 4, timeout_s=_LIMIT_S)


def _sum_of_ones(group: dist.ProcessGroup) -> float:
    """Sum, after what a rank that was late to hear of it may still have to hear."""
    for is_last in (False, True):
        try:
            return cc.all_reduce(torch.ones(1), group=group).item()
        except MismatchError:
            if is_last:
                raise
    return 0.0


def test_a_rank_whose_other_thread_may_come_is_in_no_circle() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        one, two = dist.new_group(), dist.new_group()

        def call(group: dist.ProcessGroup) -> torch.Tensor:
            return cc.all_reduce(torch.ones(1), group=group, timeout_s=30)

        if rank == 0:
            call(two)
            return [call(one).item(), call(two).item()]
        found: list[float] = []
        is_known = threading.Event()

        def late() -> None:
            call(two)
            is_known.set()
            time.sleep(2.0)
            found.append(call(one).item())

        other = threading.Thread(target=late)
        other.start()
        is_known.wait()
        found.append(call(two).item())
        other.join()
        return found

    assert run_ranks(fn, 2, timeout_s=_LIMIT_S) == [[2, 2], [2, 2]]


def test_a_large_send_that_is_being_received_is_no_link_of_a_circle() -> None:
    def fn(rank: int, world_size: int) -> float:
        cc.all_reduce(torch.ones(1))
        if rank == 0:
            cc.send(torch.ones(_LARGE), dst=1)
            cc.send(torch.tensor(5.0), dst=2)
            return 0.0
        if rank == 2:
            got = cc.recv(src=0)
            cc.send(got, dst=1)
            return got.item()
        streams = Lane.of(group_state(None))._streams
        receive, piece_bytes = streams.recv_some, _LARGE // 16  # 64 pieces

        def slowly(peer: int, into: memoryview) -> int:
            time.sleep(0.04 if peer == 0 else 0)
            return receive(peer, into[:piece_bytes] if peer == 0 else into)

        streams.recv_some = slowly  # type: ignore[method-assign]
        large = cc.recv(src=0, async_op=True)
        got = cc.recv(src=2)
        return got.item() + large.wait().mean().item()

    assert run_ranks(fn, 3, timeout_s=_LIMIT_S) == [0.0, 6.0, 5.0]


@pytest.mark.parametrize("shares_memory", [True, False])
def test_calls_and_transfers_of_many_groups_that_come_about_are_no_circle(
    shares_memory: bool,
) -> None:
    """Late ones among them, each of which holds up others that hold up others."""
    if not shares_memory and not can_leave_shared_memory():
        pytest.skip("this system makes no namespaces")
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")

    def fn(rank: int, world_size: int) -> None:
        if not shares_memory:
            leave_shared_memory()
        rng, handles = random.Random(seed), []
        members = [sorted(rng.sample(range(4), rng.randint(2, 4))) for _ in range(6)]
        groups = [dist.new_group(ranks) for ranks in members]
        for _ in range(12):
            ranks, group = rng.choice([*zip(members, groups, strict=True)])
            src, dst = rng.sample(ranks, 2)
            kind, late, late_s = rng.randrange(3), rng.choice(ranks), rng.choice((0.0, 0.7, 1.3))
            how: Any = {"group": group, "async_op": rng.random() < 0.4}
            if rank == late:
                time.sleep(late_s)
            if kind == 0 and rank in ranks:
                handles.append(cc.all_reduce(torch.ones(2), **how))
            elif kind and rank == src:
                x = torch.ones(_LARGE if kind == 1 else 1)
                handles.append(cc.send(x, dst=ranks.index(dst), **how))
            elif kind and rank == dst:
                handles.append(cc.recv(src=ranks.index(src), **how))
        for handle in handles:
            _ = handle.wait() if isinstance(handle, cc.Handle) else handle

    run_ranks(fn, 4, timeout_s=_LIMIT_S)


def _total(group: dist.ProcessGroup | None = None) -> float:
    """From one place on every rank."""
    return cc.all_reduce(torch.ones(1), group=group).item()


def test_a_receive_behind_one_that_timed_out_is_no_circle_with_who_has_sent_for_it() -> None:
    """It waits for the first message, which travels while its sender is in a call."""

    def fn(rank: int, world_size: int) -> float:
        _total()
        if rank == 1:
            time.sleep(2.5)  # the second receive has asked by then
            handle = cc.send(torch.ones(_LARGE), dst=0, async_op=True)
            total = _total()
            handle.wait()
            return total
        first = cc.recv(src=1, timeout_s=1.0, async_op=True)
        second = cc.recv(src=1, async_op=True)
        with pytest.raises(CollectiveTimeoutError):
            first.wait()
        assert second.wait().sum().item() == _LARGE
        return _total()

    assert run_ranks(fn, 2, timeout_s=_LIMIT_S) == [2.0, 2.0]


def test_a_question_that_is_over_is_taken_back_though_another_thread_was_in_a_call() -> None:
    def fn(rank: int, world_size: int) -> float:
        one = dist.new_group()
        _total(one)
        if rank == 1:
            time.sleep(3.0)
            _total(one)
            return _total(one)  # before the other comes

        def call() -> None:
            time.sleep(0.8)  # when the receive has asked
            _total(one)

        other = threading.Thread(target=call)
        other.start()
        with pytest.raises(CollectiveTimeoutError):
            cc.recv(src=1, group=one, timeout_s=1.5)
        other.join()
        time.sleep(1.5)
        return _total(one)

    assert run_ranks(fn, 2, timeout_s=_LIMIT_S) == [2.0, 2.0]


def test_a_thread_that_has_ended_keeps_no_circle_from_being_told() -> None:
    def fn(rank: int, world_size: int) -> float:
        _total()
        for _ in range(3):
            turn = cc.send if rank else cc.recv
            thread = threading.Thread(
                target=lambda turn=turn: turn(torch.ones(1), dst=0) if rank else turn(src=1)
            )
            thread.start()
            thread.join()
        started = time.monotonic()
        with pytest.raises(MismatchError, match="the two ranks wait for each other"):
            cc.recv(src=1 - rank)
        took_s = time.monotonic() - started
        _go_on(rank, world_size)
        return took_s

    assert max(run_ranks(fn, 2, timeout_s=_LIMIT_S)) < _LIMIT_S / 3


def test_a_store_that_does_not_answer_delays_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        groups = [dist.new_group() for _ in range(12)]
        for group in groups:
            group_state(group)  # known, and of no use so far
        _go_on(rank, world_size)
        if rank == 1:
            time.sleep(4.0)
            return []

        class Hung:
            def check(self, keys: list[str]) -> bool:
                time.sleep(60)
                return False

            def set(self, key: str, value: str) -> None:
                time.sleep(60)

        number = threading.active_count()
        monkeypatch.setattr(GroupState, "store", lambda _: Hung())
        started = time.monotonic()
        with pytest.raises(CollectiveTimeoutError):
            cc.recv(src=1, timeout_s=2.0)
        took_s = time.monotonic() - started
        return [took_s, threading.active_count() - number]

    took_s, threads = run_ranks(fn, 2, timeout_s=_LIMIT_S)[0]
    assert took_s < 3.5 and threads <= 2


def test_a_wait_in_a_group_that_was_destroyed_ends_in_its_error_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(rank: int, world_size: int) -> int:
        _go_on(rank, world_size)
        if rank == 1:
            time.sleep(2.0)
            return 0
        raised: list[object] = []
        monkeypatch.setattr(threading, "excepthook", raised.append)
        handle = cc.recv(src=1, timeout_s=1.5, async_op=True)
        dist.destroy_process_group()
        with pytest.raises(CollectiveTimeoutError):
            handle.wait()
        return len(raised)

    assert run_ranks(fn, 2, timeout_s=_LIMIT_S) == [0, 0]


def test_a_program_that_only_dispatches_is_told_of_a_circle_of_groups() -> None:
    def fn(rank: int, world_size: int) -> float:
        groups = [dist.new_group() for _ in range(2)]

        def dispatch(group: dist.ProcessGroup) -> None:
            choices, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
            cc.dispatch(torch.ones(2, 4), choices, weights, num_experts=2, group=group)

        for group in groups:
            dispatch(group)
        started = time.monotonic()
        with pytest.raises(MismatchError, match="wait for each other in 2 groups"):
            dispatch(groups[rank])
        return time.monotonic() - started

    assert max(run_ranks(fn, 2, timeout_s=_LIMIT_S)) < _LIMIT_S / 3

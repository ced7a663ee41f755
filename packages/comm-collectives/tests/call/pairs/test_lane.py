"""Messages of two ranks: threads that share a stream, and ranks that wait for each other."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import comm_collectives as cc
from comm_collectives.call.groups.groups import group_state
from comm_collectives.call.pairs import pair
from comm_collectives.call.pairs.lane import Lane
from comm_collectives.call.pairs.pair import Word
from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError
from ranktest import mark, more_than_sockets_hold, run_ranks, until_marked

_LARGE = more_than_sockets_hold() // 4  # floats that find no room under way
_WITHIN_S = 2.0


def test_threads_that_wait_for_one_peer_share_its_stream() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        state = group_state(None)
        lane, keys = Lane.of(state), list(range(1, 9))
        if rank == 1:
            for key in reversed(keys):
                lane.send(state, "test", [torch.tensor(float(key))], 0, key=key)
            return []
        found: dict[int, float] = {}

        def take(key: int) -> None:
            message = lane.take(*lane.post(state, "test", 1, key=key, limit_s=30))
            found[key] = message.tensors[0].item()

        threads = [threading.Thread(target=take, args=(key,)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [found[key] for key in keys]

    assert run_ranks(fn, 2)[0] == list(range(1, 9))


def test_messages_of_several_threads_do_not_mix() -> None:
    def fn(rank: int, world_size: int) -> None:
        state = group_state(None)
        lane, keys = Lane.of(state), list(range(1, 41))
        if rank == 0:
            for key in keys:
                (got,) = lane.take(*lane.post(state, "test", 1, key=key)).tensors
                assert got.tolist() == [key] * (1000 * key)
            return

        def give(part: list[int]) -> None:
            for key in part:
                x = torch.full((1000 * key,), float(key))
                lane.send(state, "test", [x], 0, key=key)

        threads = [threading.Thread(target=give, args=(keys[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        lane.send(state, "test", [], 0, key=99).wait()

    run_ranks(fn, 2)


def test_what_came_from_any_rank_is_not_kept_for_the_others() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            for _ in range(20):
                drop_in.recv(torch.zeros(3))
            assert not any(pair._tickets for pair in Lane.of(group_state(None)).pairs.values())
        elif rank == 1:
            for _ in range(20):
                drop_in.send(torch.ones(3), 0)

    run_ranks(fn, 3)


def test_word_of_waits_does_not_pile_up_beside_messages_in_order() -> None:
    text = "0\n" + "x" * 100_000  # that it waits for what has come, which is no circle
    num_words = 2 * more_than_sockets_hold() // len(text)

    def fn(rank: int, world_size: int) -> list[float]:
        state = group_state(None)
        lane = Lane.of(state)
        if rank == 1:
            lane.send(state, "test", [], 0).wait()
            until_marked("said all")
            posted = [lane.post(state, "test", 0) for _ in range(3)]
            taken = [lane.take(*each).tensors[0].item() for each in posted]
            assert lane.pairs[0].awaited is None  # it was taken back
            return taken
        lane.take(*lane.post(state, "test", 1))  # so that they are connected
        pair, handles = lane.pairs[1], [lane.send(state, "test", [torch.tensor(0.0)], 1)]
        for _ in range(num_words):
            pair.say(Word.AWAITED, 0, 0, text)
            assert pair._link.queued == len(pair._kept) <= 2
        handles.append(lane.send(state, "test", [torch.tensor(1.0)], 1))
        pair.say(Word.AWAITED, 0, 0, text)
        pair.say(Word.AWAITED, 0, 0, "")
        handles.append(lane.send(state, "test", [torch.tensor(2.0)], 1))
        assert [handle.is_done() for handle in handles] == [True, False, False]
        mark("said all")
        for handle in handles:
            handle.wait()
        return []

    assert run_ranks(fn, 2)[1] == [0, 1, 2]


def test_a_message_that_nobody_wants_is_discarded() -> None:
    def fn(rank: int, world_size: int) -> list[float]:
        state = group_state(None)
        lane = Lane.of(state)
        if rank == 1:
            for key in (3, 1, 2):
                lane.send(state, "test", [torch.tensor(10.0 * key)], 0, key=key)
            return []
        lane.pairs[1].forget(3)
        taken = [lane.take(*lane.post(state, "test", 1, key=key)) for key in (2, 1)]
        assert not lane.pairs[1]._arrived[3]
        return [message.tensors[0].item() for message in taken]

    assert run_ranks(fn, 2)[0] == [20, 10]


def test_a_large_send_goes_on_while_both_programs_compute() -> None:
    def fn(rank: int, world_size: int) -> bool:
        state = group_state(None)
        lane, x = Lane.of(state), torch.full((_LARGE,), rank)
        handle = cc.isend_tensors([x], dst=1 - rank)
        lane.expect(1 - rank)
        deadline = time.monotonic() + 60
        while (lane.pairs[1 - rank].is_expecting or not handle.is_done()) and (
            time.monotonic() < deadline
        ):
            torch.ones(64, 64).mm(torch.ones(64, 64))
        assert handle.is_done()
        assert not lane.pairs[1 - rank].is_expecting
        return bool((cc.recv_tensors(src=1 - rank)[0] == 1 - rank).all())

    assert run_ranks(fn, 2) == [True, True]


_CROSSED: dict[str, Callable[[int], object]] = {
    "recv against all_reduce": lambda rank: (
        cc.recv(src=1) if rank == 0 else cc.all_reduce(torch.ones(2))
    ),
    "all_reduce against recv_tensors": lambda rank: (
        cc.all_reduce(torch.ones(_LARGE)) if rank == 0 else cc.recv_tensors(src=0)
    ),
    "a large send against all_gather": lambda rank: (
        cc.send(torch.ones(_LARGE), dst=1) if rank == 0 else cc.all_gather(torch.ones(2))
    ),
    "recv against recv": lambda rank: cc.recv(src=1 - rank),
}


def _cross(name: str, rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(MismatchError, match="the two ranks wait for each other") as caught:
        _CROSSED[name](rank)
    took_s = time.monotonic() - started
    assert took_s < 5 * _WITHIN_S, f"{name}: {took_s} s"
    assert "test_lane.py" in str(caught.value)
    # The group goes on, in both ways.
    assert cc.all_reduce(torch.ones(1)).item() == 2
    handle = cc.send(torch.tensor([rank]), dst=1 - rank, async_op=True)
    assert cc.recv(src=1 - rank).item() == 1 - rank
    handle.wait()


@pytest.mark.parametrize("first", _CROSSED)
def test_ranks_that_wait_for_each_other_first_of_all_are_told_so_and_go_on(first: str) -> None:
    run_ranks(lambda rank, world_size: _cross(first, rank), 2)


def test_ranks_that_wait_for_each_other_again_and_again_are_told_so_and_go_on() -> None:
    def fn(rank: int, world_size: int) -> None:
        cc.all_reduce(torch.ones(1))
        other = cc.isend_tensors([torch.tensor(rank)], dst=1 - rank)
        cc.recv_tensors(src=1 - rank)
        other.wait()
        for name in _CROSSED:
            _cross(name, rank)

    run_ranks(fn, 2)


def test_a_rank_that_may_still_send_is_waited_for() -> None:
    """It has called without waiting."""

    def fn(rank: int, world_size: int) -> list[float]:
        def total() -> cc.Handle[torch.Tensor]:
            return cc.all_reduce(torch.ones(1), async_op=True)

        total().wait()
        if rank == 0:
            return [cc.recv(src=1).item(), total().wait().item()]
        handle = total()
        time.sleep(1.5)
        cc.send(torch.ones(()), dst=0)
        return [handle.wait().item()]

    assert run_ranks(fn, 2) == [[1, 2], [2]]


def test_a_send_that_came_to_nothing_does_not_hide_the_next_wait_for_each_other() -> None:
    def fn(rank: int, world_size: int) -> float:
        x = torch.ones(_LARGE)
        with pytest.raises(MismatchError, match="wait for each other"):
            cc.send(x, dst=1) if rank == 0 else cc.all_gather(torch.ones(2))
        started = time.monotonic()
        with pytest.raises(MismatchError, match="wait for each other"):
            cc.all_reduce(torch.ones(2)) if rank == 0 else cc.recv(src=0)
        return time.monotonic() - started

    assert max(run_ranks(fn, 2, timeout_s=60)) < 10  # its limit is 60 s


def test_a_refused_send_fails_though_the_peer_read_it_away_at_that_moment() -> None:
    def fn(rank: int, world_size: int) -> None:
        if rank == 1:
            with pytest.raises(MismatchError, match="wait for each other"):
                cc.all_gather(torch.ones(2))
            assert cc.recv(src=0).item() == 5  # reads the large message as well, for nobody
            return
        pair = Lane.of(group_state(None)).pairs[1]
        flush_once = pair.flush

        def flush() -> bool:  # as where the peer reads while this rank gets no time to
            until_s = time.monotonic() + 1
            while not flush_once() and time.monotonic() < until_s:
                time.sleep(1e-3)
            return flush_once()

        pair.flush = flush  # type: ignore[method-assign]
        with pytest.raises(MismatchError, match="wait for each other"):
            cc.send(torch.ones(_LARGE), dst=1)
        cc.send(torch.tensor(5), dst=1)

    run_ranks(fn, 2, timeout_s=60)


def test_ranks_without_part_in_a_transfer_hear_that_both_left_the_call() -> None:
    def fn(rank: int, world_size: int) -> float:
        cc.all_reduce(torch.ones(2))
        with pytest.raises(MismatchError):
            if rank == 0:
                cc.recv(src=2)
            else:
                cc.all_reduce(torch.ones(_LARGE) if rank == 2 else torch.ones(1))
        return cc.all_reduce(torch.tensor([1.0])).item()

    assert run_ranks(fn, 3, timeout_s=60) == [3, 3, 3]


def test_a_message_for_which_there_was_no_memory_comes_whole_to_who_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        cc.all_reduce(torch.ones(1))
        if rank:
            for number in range(3):
                cc.isend_tensors([torch.full((5,), number), torch.ones(number)], dst=0).wait()
            return []
        made, left = pair.from_bytes, [2]

        def make(*args: object) -> torch.Tensor:
            if left[0]:
                left[0] -= 1
                raise torch.OutOfMemoryError("no memory for it")
            return made(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(pair, "from_bytes", make)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory for it"):
                cc.recv_tensors(src=1)
        found = []
        for number in range(3):
            five, ones = cc.recv_tensors(src=1)
            assert five.tolist() == [number] * 5 and len(ones) == number
            found.append(number)
        return found

    assert run_ranks(fn, 2, timeout_s=60) == [[0, 1, 2], []]

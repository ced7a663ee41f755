"""Meetings on a mailbox and over the wire say the same to every rank."""

import pytest

from comm_collectives.call.calls import Call
from comm_collectives.call.control.exchange import (
    TEXT_BYTES,
    ControlExchange,
    MailboxExchange,
    WireExchange,
)
from comm_collectives.call.control.mailbox import Arrival
from comm_collectives.call.groups.groups import group_state
from ranktest import run_ranks


def _open(place: str, call: Call) -> ControlExchange:
    state = call.state
    if place == "wire":
        return WireExchange(state.transport, state.size, "cpu")
    return ControlExchange.open(state.transport, state.rank, state.size, "cpu", call)


@pytest.mark.parametrize("place", ["mailbox", "wire"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_heads_reach_all_and_parts_their_rank(place: str, world_size: int) -> None:
    def fn(rank: int, world_size: int) -> None:
        call = Call(group_state(None), "test")
        control = _open(place, call)
        for turn in range(5):
            head = bytes([turn, rank]) * 64
            parts = [bytes([1 + rank, 1 + dst]) * 192 for dst in range(world_size)]
            met = control.meet(head, parts, call)
            assert met.heads == [bytes([turn, src]) * 64 for src in range(world_size)]
            assert met.parts == [bytes([1 + src, 1 + rank]) * 192 for src in range(world_size)]
            assert not met.all_equal
            assert control.meet(b"same", None, call).all_equal

    run_ranks(fn, world_size)


@pytest.mark.parametrize("place", ["mailbox", "wire"])
def test_long_texts_are_cut_and_short_ones_kept(place: str) -> None:
    def fn(rank: int, world_size: int) -> None:
        call = Call(group_state(None), "test")
        control = _open(place, call)
        texts = control.tell(b"" if rank == 0 else b"x" * 5000, call)
        assert texts == [b"", b"x" * TEXT_BYTES]
        assert control.tell(b"rank %d" % rank, call) == [b"rank 0", b"rank 1"]

    run_ranks(fn, 2)


def test_ranks_of_one_host_find_their_shared_memory() -> None:
    def fn(rank: int, world_size: int) -> str:
        return type(_open("mailbox", Call(group_state(None), "test"))).__name__

    assert run_ranks(fn, 3) == [MailboxExchange.__name__] * 3


def test_ranks_ahead_are_seen() -> None:
    def fn(rank: int, world_size: int) -> object:
        state = group_state(None)
        call = Call(state, "test")
        control = _open("mailbox", call)
        assert isinstance(control, MailboxExchange)
        control.meet(b"first", None, call)
        if rank == 1:
            while not control.ahead():
                pass
            seen = [head.rstrip(b"\0") for head in control.ahead()]
            control.meet(b"second", None, call)
            return seen
        control.meet(b"second", None, call)
        return control.ahead()

    assert run_ranks(fn, 2) == [[], [b"second"]]


def test_absent_rank_is_reported_by_the_waiting_call() -> None:
    def fn(rank: int, world_size: int) -> object:
        state = group_state(None)
        call = Call(state, "test", timeout_s=0.3)
        control = state.control = _open("mailbox", call)
        if rank == 1:
            return None
        try:
            control.meet(b"here", None, call)
        except RuntimeError as error:
            return str(error)
        return None

    text = run_ranks(fn, 2)[0]
    assert "test call 1 of group (0, 1) timed out after 0.3 s" in str(text)
    assert "did not arrive: rank 1 (not seen in this group yet)" in str(text)


def test_dead_rank_counts_more_than_a_missing_one() -> None:
    def fn(rank: int, world_size: int) -> str:
        call = Call(group_state(None), "test")
        both = Arrival(missing=(1, 2), dead=(2,), withdrawn=(0,))
        error = call.not_all_here(both)
        return f"{type(error).__name__}: {error}"

    text = run_ranks(fn, 3)[0]
    assert str(text).startswith("PeerFailedError: rank 0: test call 1 of group (0, 1, 2) lost")
    assert "rank 2 has ended or given up its group" in str(text)

"""Ranks that wait for each other in a circle are told so, and nobody who is merely late."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import comm_collectives as cc
from comm_collectives.call.groups import group_state
from comm_collectives.call.pairs import Lane
from comm_collectives.collectives import drop_in
from comm_collectives.errors import MismatchError
from ranktest import run_ranks

_LARGE = 1 << 23
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


def test_a_rank_counts_the_call_that_its_transfer_ended_though_another_thread_looks_around() -> (
    None
):
    def fn(rank: int, world_size: int) -> None:
        _go_on(rank, world_size)
        state = group_state(None)

        def look_around() -> None:  # as who answers for dropped graphs, but for longer
            while Lane.of(state).questions._asked is None:
                time.sleep(1e-3)
            with state.lock:
                time.sleep(0.3)

        if rank == 0:
            looks = threading.Thread(target=look_around)
            looks.start()
        with pytest.raises(MismatchError, match="the two ranks wait for each other"):
            cc.recv(src=1) if rank == 0 else cc.all_reduce(torch.ones(2))
        if rank == 0:
            looks.join()
        _go_on(rank, world_size)

    run_ranks(fn, 2, timeout_s=_LIMIT_S)

"""What the words of a backend mean, who is to blame, and the class in which all ranks fail."""

import signal
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call import Call
from comm_collectives.call.agreed import Agreed
from comm_collectives.call.failures import (
    Report,
    describe_absent,
    first_failure,
)
from comm_collectives.call.groups.groups import GroupState, group_state
from comm_collectives.errors import (
    CollectiveTimeoutError,
    CommError,
    MismatchError,
    PeerFailedError,
)
from comm_collectives.simulation.run import SimRank, simulate
from ranktest import run_ranks


def _report(number: int, problem: str, rank: int) -> Report:
    return Report(number=number, name="all_reduce", problem=problem, rank=rank)


def _ask(state: GroupState, number: int, problem: str) -> str:
    return first_failure(state, _report(number, problem, state.rank)).problem


def test_ranks_that_are_gone_are_told_from_those_that_are_late() -> None:
    def fn(rank: int, world_size: int) -> list[tuple[type, str]]:
        state = group_state(None)
        return [describe_absent(state, [2], [2], 3.0), describe_absent(state, [2], [], 3.0)]

    lost, late = run_ranks(fn, 3)[1]
    assert lost == (PeerFailedError, "lost a peer: rank 2 has ended or given up its group")
    assert late[0] is CollectiveTimeoutError
    assert late[1] == (
        "timed out after 3 s; did not arrive: rank 2 (not seen in this group yet); arrived: rank 0"
    )


def test_first_rank_to_fail_decides() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        state = group_state(None)
        time.sleep(0.5 * rank)
        first = _ask(state, 5 + rank, f"P{rank}")
        dist.barrier()
        time.sleep(0.5 * (1 - rank))
        return [first, _ask(state, 9, f"Q{rank}")]

    assert run_ranks(fn, 2) == [["P0", "Q1"]] * 2


@pytest.mark.parametrize(("own", "wanted"), [(7, "first"), (80, "own"), (700, "own")])
def test_record_of_a_far_away_call_is_not_believed(own: int, wanted: str) -> None:
    def call(rank: SimRank) -> str:
        state = rank.group.state()
        if rank.rank == 0:
            return _ask(state, 5, "first")
        rank.sleep(1.0)
        return _ask(state, own, "own")

    assert simulate(call, 2).outcomes[1].values == (wanted,)


def test_record_of_a_failure_that_this_rank_had_before_is_not_believed() -> None:
    def call(rank: SimRank) -> list[str]:
        state = rank.group.state()
        if rank.rank == 0:  # fails twice where the other fails once
            return [_ask(state, 5, "a"), _ask(state, 6, "b")]
        rank.sleep(1.0)
        return [_ask(state, 6, "c"), _ask(state, 9, "d")]

    assert simulate(call, 2).outcomes[1].values == (["a", "d"],)


def test_without_a_store_ranks_go_by_what_they_see() -> None:
    class Broken:
        def compare_set(self, *texts: str) -> str:
            raise RuntimeError("connection refused")

    def call(rank: SimRank) -> str:
        state = rank.group.state()
        state.transport.world.store = Broken()  # type: ignore[attr-defined]
        return _ask(state, 5, f"own {rank.rank}")

    assert [o.values[0] for o in simulate(call, 2).outcomes] == ["own 0", "own 1"]


def test_rank_whose_peer_gave_up_raises_what_the_peer_raised() -> None:
    def call(rank: SimRank) -> object:
        if rank.rank == 1:
            rank.sleep(50.0)
        return cc.all_reduce(torch.ones(500), group=rank.group)

    first, second, _ = simulate(call, 3, shared_memory=False).outcomes
    assert type(first.error) is type(second.error) is CollectiveTimeoutError
    assert " failed in it with a CollectiveTimeoutError" in str(second.error)


def test_first_call_that_a_rank_leaves_is_counted_as_the_others_count_it() -> None:
    """Else the next failure would be of two classes."""

    def fn(rank: int, world_size: int) -> None:
        if rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                cc.all_reduce(torch.ones(1))
        else:
            time.sleep(1.0)
            with pytest.raises(CommError, match="rank 0 failed in it with a KeyboardInterrupt"):
                cc.all_reduce(torch.ones(1))
        with pytest.raises(MismatchError):
            cc.all_reduce(torch.ones(2 + rank))

    run_ranks(fn, 2)


def test_call_that_ended_well_on_one_rank_alone_is_counted_as_a_failure() -> None:
    """Else that rank would raise the next failure in the class of this one."""

    def fn(rank: int, world_size: int) -> None:
        def place(agreed: Agreed) -> list[torch.Tensor]:
            if rank == 0:
                time.sleep(0.5)  # the other rank has got all by now
                raise CommError("no room")
            return [torch.empty(1, dtype=torch.uint8) for _ in agreed.sizes]

        cc.all_reduce(torch.ones(1))
        call = Call(group_state(None), "exchange")
        sent = [torch.ones(1, dtype=torch.uint8)] * 2
        with pytest.raises(CommError, match="no room") if rank == 0 else nullcontext():
            call.exchange(sent, place)
        with pytest.raises(MismatchError):
            cc.all_reduce(torch.ones(2 + rank))

    run_ranks(fn, 2)

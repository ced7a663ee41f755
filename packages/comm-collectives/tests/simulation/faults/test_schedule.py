"""Schedules of faults are data: printable, repeatable, applied where they say."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

import comm_collectives as cc
from comm_collectives.simulation.faults.schedule import (
    Delay,
    Fault,
    FaultSchedule,
    Kill,
    Reorder,
    Skip,
    Truncate,
    ZeroTokens,
)
from comm_collectives.simulation.run import SimRank, simulate


def test_a_printed_schedule_is_the_expression_that_makes_it() -> None:
    for seed in range(50):
        schedule = FaultSchedule.random(seed, num_ranks=8, num_calls=4)
        assert eval(str(schedule)) == schedule
        assert FaultSchedule.random(seed, num_ranks=8, num_calls=4) == schedule


def test_random_schedules_hold_every_kind_on_every_rank_and_call() -> None:
    drawn = [FaultSchedule.random(seed, num_ranks=4, num_calls=3) for seed in range(500)]
    faults = [fault for schedule in drawn for fault in schedule.faults]
    assert {type(f) for f in faults} == {Delay, Kill, Skip, Reorder, Truncate, ZeroTokens}
    assert {(f.rank, f.call) for f in faults} == {(r, c) for r in range(4) for c in range(3)}
    assert all(fault.peer != fault.rank for fault in faults if isinstance(fault, Truncate))
    assert {len(schedule) for schedule in drawn} == {1, 2, 3, 4}
    gentle = [s for s in drawn if all(isinstance(f, Delay | ZeroTokens) for f in s.faults)]
    assert len(gentle) > 100


def test_order_leaves_out_and_swaps_calls_of_one_rank() -> None:
    schedule = FaultSchedule((Skip(rank=0, call=1), Reorder(rank=1, call=1)))
    assert [schedule.order(rank, 4) for rank in range(3)] == [
        [0, 2, 3],
        [0, 2, 1, 3],
        [0, 1, 2, 3],
    ]
    # There is nothing to swap the last call with.
    assert FaultSchedule((Reorder(rank=0, call=3),)).order(0, 4) == [0, 1, 2, 3]


def test_schedules_can_be_taken_apart() -> None:
    first, second = Skip(rank=0, call=1), ZeroTokens(rank=1, call=0)
    schedule = FaultSchedule((first, second))
    assert schedule.without(first) == FaultSchedule((second,))
    assert schedule.of(1, 0) == [second]
    assert schedule.of(1, 1) == []
    assert len(FaultSchedule()) == 0


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(1, 3), (4, 0)])
def test_schedules_need_ranks_and_calls(num_ranks: int, num_calls: int) -> None:
    with pytest.raises(ValueError, match="give at least 2 ranks and 1 call"):
        FaultSchedule.random(1, num_ranks, num_calls)


def test_schedules_hold_faults_and_delays_are_times() -> None:
    wrong: Any
    for wrong in (Kill(rank=0, call=0), (3,), None):
        with pytest.raises(TypeError, match="give a tuple of Kill"):
            FaultSchedule(wrong)
    for delay_s in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"delay_s=.* must be at least 0"):
            Delay(rank=0, call=0, delay_s=delay_s)


def _long(rank: SimRank) -> torch.Tensor:
    """Two operations: each rank gets its rows of all, and shows what they come to."""
    return cc.all_reduce(torch.full((4 * rank.size, 200), float(rank.rank)), group=rank.group)


def _run(*faults: Fault, shared_memory: bool) -> Counter[str]:
    """How the ranks of a program of two calls end."""
    result = simulate([_long, _long], 6, faults=FaultSchedule(faults), shared_memory=shared_memory)
    assert not result.hung
    return Counter(type(o.error).__name__ if o.error else o.ending for o in result.outcomes)


@pytest.mark.parametrize("operation", range(4))
@pytest.mark.parametrize("reached", [0, 3, 5])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_rank_killed_anywhere_in_a_call_is_a_lost_peer_for_all_others(
    operation: int, reached: int, shared_memory: bool
) -> None:
    kill = Kill(rank=2, call=0, operation=operation, reached=reached)
    assert _run(kill, shared_memory=shared_memory) == {"killed": 1, "PeerFailedError": 5}


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("operation", range(4))
def test_rank_late_anywhere_in_a_call_delays_all_and_harms_none(
    operation: int, shared_memory: bool
) -> None:
    delay = Delay(rank=2, call=0, operation=operation, delay_s=1.5)
    result = simulate(
        [_long, _long], 6, faults=FaultSchedule((delay,)), shared_memory=shared_memory
    )
    assert result.elapsed_s == pytest.approx(1.5)
    assert [o.ending for o in result.outcomes] == ["returned"] * 6


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("operation", [1, 2])
def test_message_cut_short_is_a_lost_peer_for_all(operation: int, shared_memory: bool) -> None:
    cut = Truncate(rank=1, call=0, operation=operation, peer=4)
    assert _run(cut, shared_memory=shared_memory) == {"PeerFailedError": 6}


def test_rank_that_leaves_the_last_call_out_ends_and_the_others_lose_it() -> None:
    for shared_memory in (True, False):
        found = _run(Skip(rank=3, call=1), shared_memory=shared_memory)
        assert found == {"returned": 1, "PeerFailedError": 5}

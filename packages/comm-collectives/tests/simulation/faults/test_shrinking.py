"""A failing run becomes a short one that still fails."""

import pytest
import torch

import comm_collectives as cc
from comm_collectives.simulation.faults.schedule import (
    Delay,
    FaultSchedule,
    Kill,
    Skip,
    Truncate,
    ZeroTokens,
)
from comm_collectives.simulation.faults.shrinking import Scenario, shrink
from comm_collectives.simulation.run import SimRank, simulate

_NOISE = (
    Delay(rank=9, call=3, delay_s=0.4),
    ZeroTokens(rank=2, call=1),
    Delay(rank=2, call=0, operation=2, delay_s=0.1),
)


def _start(*faults: object) -> Scenario:
    return Scenario(num_ranks=40, calls=(0, 1, 2, 3, 4), faults=FaultSchedule((*_NOISE, *faults)))  # type: ignore[arg-type]


def test_one_fault_one_call_and_the_fewest_ranks_are_left() -> None:
    def fails(scenario: Scenario) -> bool:
        return any(
            isinstance(f, Kill) and scenario.calls[f.call] == 2 for f in scenario.faults.faults
        )

    small = shrink(_start(Kill(rank=30, call=2, operation=4, reached=20)), fails)
    assert small == Scenario(num_ranks=2, calls=(2,), faults=FaultSchedule((Kill(rank=0, call=0),)))


def test_faults_that_need_each_other_stay_together_in_their_order() -> None:
    def fails(scenario: Scenario) -> bool:
        skips = [f.rank for f in scenario.faults.faults if isinstance(f, Skip)]
        return len(skips) == 2 and skips[0] < skips[1] < scenario.num_ranks - 1

    small = shrink(_start(Skip(rank=7, call=2), Skip(rank=20, call=3)), fails)
    assert small.num_ranks == 3
    assert [fault.rank for fault in small.faults.faults] == [0, 1]
    assert len(small.calls) == 2  # one for each, since a call takes its faults along


def test_both_ends_of_a_cut_message_keep_different_names() -> None:
    def fails(scenario: Scenario) -> bool:
        return any(isinstance(f, Truncate) for f in scenario.faults.faults)

    small = shrink(_start(Truncate(rank=31, call=4, operation=3, peer=5)), fails)
    assert small.faults == FaultSchedule((Truncate(rank=1, call=0, operation=1, peer=0),))
    assert small.num_ranks == 2


def test_number_of_tries_is_bounded() -> None:
    tries = 0

    def fails(scenario: Scenario) -> bool:
        nonlocal tries
        tries += 1
        return True

    shrink(_start(), fails, max_tries=3)
    assert tries == 4  # one more to see that the start fails


def test_scenario_that_does_not_fail_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        shrink(_start(), lambda scenario: False)


def test_a_program_that_forgets_empty_ranks_shrinks_to_one_empty_rank() -> None:
    def share(rank: SimRank) -> object:
        if not rank.has_tokens:
            return None  # the classic mistake: nothing to send, so no call
        return cc.all_to_all(torch.ones(rank.size), group=rank.group)

    def others(rank: SimRank) -> object:
        return cc.all_reduce(torch.ones(3), group=rank.group)

    program = [others, share, others, share, others]

    def fails(scenario: Scenario) -> bool:
        result = simulate(
            [program[call] for call in scenario.calls], scenario.num_ranks, faults=scenario.faults
        )
        return any(isinstance(o.error, cc.CommError) for o in result.outcomes)

    small = shrink(_start(ZeroTokens(rank=17, call=3)), fails)
    assert small.num_ranks == 2
    assert len(small.calls) == 1
    assert program[small.calls[0]] is share
    assert [type(fault) for fault in small.faults.faults] == [ZeroTokens]

"""The steps that lost nodes cost, from the plan alone."""

from itertools import combinations

import pytest

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.tiers.plan import CopyPlan
from unified_ckpt.tiers.recovery import describe_recovery, recovery_goals


def plan_of(num_nodes: int, copies: int) -> CopyPlan:
    return CopyPlan.of([f"n{number}" for number in range(num_nodes)], copies=copies)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 6])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_the_goals_are_those_of_the_worst_choice_of_lost_nodes(num_nodes: int, copies: int) -> None:
    plan = plan_of(num_nodes, copies)
    goals = {goal.lost_nodes: goal for goal in recovery_goals(plan, tier_steps=5, storage_steps=90)}
    for count in range(num_nodes + 1):
        lost_for_good = any(
            {node, *plan.keepers(node)} <= set(lost)
            for lost in combinations(range(num_nodes), count)
            for node in range(num_nodes)
        )
        goal = goals[min(count, max(goals))]
        assert goal.lost_steps == (90 if lost_for_good else 5)
        assert goal.source == ("storage" if lost_for_good else "peer" if count else "local")


def test_saves_beside_training_cost_the_steps_that_go_on_meanwhile() -> None:
    goals = recovery_goals(plan_of(2, 1), tier_steps=5, storage_steps=None, saves_behind=2)
    assert [goal.lost_steps for goal in goals] == [15, 15, None]


def test_the_goal_is_said_in_plain_lines() -> None:
    assert describe_recovery(plan_of(3, 1), tier_steps=10, storage_steps=500) == [
        "tier of 3 nodes, copies: n0 -> n1; n1 -> n2; n2 -> n0",
        "processes die, but no node: at most 10 steps lost; each node reads its own copy",
        "any 1 node lost: at most 10 steps lost; the copies come from other nodes",
        "2 nodes or more lost: at most 500 steps lost; storage is read",
    ]
    alone = describe_recovery(plan_of(1, 1), tier_steps=1, storage_steps=None)
    assert alone == [
        "tier of 1 node: nothing is copied to others, since there is only one",
        "processes die, but no node: at most 1 step lost; each node reads its own copy",
        "1 node or more lost: the steps since the last checkpoint there lost; storage is read",
    ]
    assert (
        "and so on for 4 more" in describe_recovery(plan_of(8, 1), tier_steps=1, storage_steps=2)[0]
    )


def test_steps_that_are_none_are_refused() -> None:
    with pytest.raises(CheckpointValueError, match="tier_steps=0 must be positive"):
        recovery_goals(plan_of(2, 1), tier_steps=0, storage_steps=1)
    with pytest.raises(CheckpointValueError, match="saves_behind=-5 must not be negative"):
        recovery_goals(plan_of(2, 1), tier_steps=1, storage_steps=2, saves_behind=-5)

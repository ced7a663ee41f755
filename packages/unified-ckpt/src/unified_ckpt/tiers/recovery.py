"""The recovery goal: how many steps a run loses at most when nodes are gone, by its plan alone.

Of a node's state the last copy is gone with the node itself and all that keep copies of it. Fewer
lost nodes cost the steps since the last state that all copies are of; more cost those since the
last checkpoint in storage.

    plan = CopyPlan.of(["a", "b", "c"], copies=1)
    print(*describe_recovery(plan, tier_steps=10, storage_steps=500), sep="\\n")
"""

from dataclasses import dataclass
from typing import Literal

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.tiers.plan import CopyPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryGoal:
    """What the loss of any `lost_nodes` nodes costs at most.

    Attributes:
        lost_nodes: nodes that are gone at once, or before the next save in the tier; 0 where all
            processes died, but no node.
        source: the farthest place that a node then reads from.
        lost_steps: finished steps that are trained again, at most; None if that is not known.
    """

    lost_nodes: int
    source: Literal["local", "peer", "storage"]
    lost_steps: int | None


def recovery_goals(
    plan: CopyPlan, *, tier_steps: int, storage_steps: int | None, saves_behind: int = 0
) -> list[RecoveryGoal]:
    """Return the goal for 0 lost nodes, 1, and so on, up to the first that only storage helps with.

    Args:
        plan: the nodes and their copies.
        tier_steps: steps between saves in the tier.
        storage_steps: steps between checkpoints in storage; None where the clock decides.
        saves_behind: saves that may be under way while the run goes on: 0 for saves that the
            trainer waits for, `num_buffers` for an `AsyncSaver`.

    Raises:
        CheckpointValueError: a number of steps is not positive, or `saves_behind` is negative.
    """
    for name, steps in (("tier_steps", tier_steps), ("storage_steps", storage_steps)):
        if steps is not None and steps < 1:
            raise CheckpointValueError(f"{name}={steps} must be positive")
    if saves_behind < 0:
        raise CheckpointValueError(f"saves_behind={saves_behind} must not be negative")
    fatal = min(1 + len(plan.keepers(node)) for node in range(len(plan.nodes)))
    behind = 1 + saves_behind
    goals = [
        RecoveryGoal(
            lost_nodes=lost, source="peer" if lost else "local", lost_steps=behind * tier_steps
        )
        for lost in range(fatal)
    ]
    last = None if storage_steps is None else behind * storage_steps
    return [*goals, RecoveryGoal(lost_nodes=fatal, source="storage", lost_steps=last)]


def describe_recovery(
    plan: CopyPlan, *, tier_steps: int, storage_steps: int | None, saves_behind: int = 0
) -> list[str]:
    """Return lines for people: the nodes and where their copies are, then the goals."""
    goals = recovery_goals(
        plan, tier_steps=tier_steps, storage_steps=storage_steps, saves_behind=saves_behind
    )
    return [_copies_line(plan), *map(_goal_line, goals)]


def _copies_line(plan: CopyPlan) -> str:
    count = len(plan.nodes)
    if not plan.copies:
        why = "there is only one" if count == 1 else "copies=0"
        return f"tier of {_many(count, 'node')}: nothing is copied to others, since {why}"
    pairs = [
        f"{plan.names[node]} -> {', '.join(plan.names[keeper] for keeper in plan.keepers(node))}"
        for node in range(min(count, 4))
    ]
    more = f", and so on for {count - 4} more" if count > 4 else ""
    return f"tier of {_many(count, 'node')}, copies: {'; '.join(pairs)}{more}"


def _goal_line(goal: RecoveryGoal) -> str:
    steps = "the steps since the last checkpoint there"
    if goal.lost_steps is not None:
        steps = f"at most {_many(goal.lost_steps, 'step')}"
    if goal.source == "local":
        return f"processes die, but no node: {steps} lost; each node reads its own copy"
    nodes = _many(goal.lost_nodes, "node")
    if goal.source == "peer":
        return f"any {nodes} lost: {steps} lost; the copies come from other nodes"
    return f"{nodes} or more lost: {steps} lost; storage is read"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

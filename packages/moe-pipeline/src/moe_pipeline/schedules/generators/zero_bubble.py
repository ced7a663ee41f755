"""Schedules that fill the bubble with weight gradients, one stage on each rank.

The backward is split: I makes the input gradient, which the previous stage waits for; W makes the
weight gradients, which nobody waits for, and goes where the rank would be idle (arXiv 2401.10241).

    schedule = zb_1p(num_stages=4, num_microbatches=8)
"""

from moe_pipeline.schedules.generators.rows import check_sizes, finish
from moe_pipeline.schedules.table import Action, Kind, Schedule


def zb_1p(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: the memory of 1F1B, `num_stages` activations on every rank.

    With T_F = T_I = T_W no rank is idle for more than `num_stages - 1` slots, a third of 1F1B.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    rows = [_row(s, num_microbatches, ahead=num_stages - s, late=s) for s in range(num_stages)]
    return finish("zb_1p", rows, num_microbatches)


def zb_2p(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: no bubble at all with T_F = T_I = T_W, for `2 num_stages - 1` activations.

    That is, each rank works from its first action to its last without a pause when there are at
    least that many microbatches; ranks start and end one after the other.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    rows = [
        _row(s, num_microbatches, ahead=2 * (num_stages - s) - 1, late=2 * s)
        for s in range(num_stages)
    ]
    return finish("zb_2p", rows, num_microbatches)


def _row(stage: int, num_microbatches: int, *, ahead: int, late: int) -> list[Action]:
    """`ahead` forwards, then I W F in turn, then I W; `late` W are deferred to the end.

    They are those of the last F, so that the last input gradients leave early.
    """
    ahead = min(ahead, num_microbatches)
    turns = num_microbatches - ahead
    row = [Action(stage, Kind.FORWARD, m) for m in range(ahead)]
    done = 0
    for m in range(num_microbatches):
        row.append(Action(stage, Kind.INPUT_GRADIENT, m))
        if m < turns - late or m >= turns:
            row.append(Action(stage, Kind.WEIGHT_GRADIENT, done))
            done += 1
        if m < turns:
            row.append(Action(stage, Kind.FORWARD, ahead + m))
    return row + [Action(stage, Kind.WEIGHT_GRADIENT, m) for m in range(done, num_microbatches)]

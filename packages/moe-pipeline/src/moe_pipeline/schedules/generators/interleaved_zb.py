"""Interleaved 1F1B with split backwards (the rules of arXiv 2401.10241 on several stages a rank).

Weight gradients run a few slots after their input gradients, so that input gradients leave early:
rank r defers r of them, as ZB-H1 does with one stage on each rank.

    schedule = interleaved_zero_bubble(num_ranks=4, num_microbatches=8)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moe_pipeline.schedules.generators.interleaved import interleaved_1f1b
from moe_pipeline.schedules.table import COMPUTE, Action, Kind, Schedule, add_transfers


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """Forwards and input gradients in the order of `interleaved_1f1b`, weight gradients between.

    Raises:
        ValueError: a size below 1.
    """
    whole = interleaved_1f1b(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
    rows = tuple(tuple(_split(row, late=rank)) for rank, row in enumerate(whole.ranks))
    return add_transfers(replace(whole, name="interleaved_zero_bubble", ranks=rows))


def _split(row: Iterable[Action], *, late: int) -> Iterator[Action]:
    """The computations of a row with I and W for each B, at most `late` W deferred at a time."""
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind not in COMPUTE:
            continue
        if action.kind != Kind.BACKWARD:
            yield action
            continue
        yield replace(action, kind=Kind.INPUT_GRADIENT)
        waiting.append(replace(action, kind=Kind.WEIGHT_GRADIENT))
        if len(waiting) > late:
            yield waiting.popleft()
    yield from waiting

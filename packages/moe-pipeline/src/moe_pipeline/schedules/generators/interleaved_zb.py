"""Interleaved 1F1B with split backwards (the rules of arXiv 2401.10241 on several stages a rank).

Weight gradients run a few slots after their input gradients, so that input gradients leave early:
rank r defers r of them, as ZB-H1 does with one stage on each rank.

    schedule = interleaved_zero_bubble(num_ranks=4, num_microbatches=8)
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moe_pipeline.schedules.generators.interleaved import interleaved_rows
from moe_pipeline.schedules.generators.rows import finish
from moe_pipeline.schedules.table import Action, Kind, Schedule


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """One forward, one input gradient over several stages of a rank, weight gradients between.

    Since input gradients come back sooner than whole backwards, a rank runs fewer forwards ahead
    than in `interleaved_1f1b`.

    Raises:
        ValueError: a size below 1.
    """
    whole = interleaved_rows(num_ranks, num_microbatches, stages_per_rank, lead=1)
    kept = ([a for a in row if a.microbatch < num_microbatches] for row in whole)
    return finish(
        "interleaved_zero_bubble",
        [_split(row, late=rank) for rank, row in enumerate(kept)],
        num_microbatches,
        num_stages=num_ranks * stages_per_rank,
    )


def _split(row: Iterable[Action], *, late: int) -> Iterator[Action]:
    """The computations of a row with I and W for each B, at most `late` W deferred at a time."""
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind != Kind.BACKWARD:
            yield action
            continue
        yield replace(action, kind=Kind.INPUT_GRADIENT)
        waiting.append(replace(action, kind=Kind.WEIGHT_GRADIENT))
        if len(waiting) > late:
            yield waiting.popleft()
    yield from waiting

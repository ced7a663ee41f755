"""The schedules themselves, each a pure function from sizes to a table.

One stage on each rank. Sends and receives are included.

    schedule = one_f_one_b(num_stages=4, num_microbatches=8)
"""

from collections.abc import Callable

from moe_pipeline.schedules.generators.rows import check_sizes, finish
from moe_pipeline.schedules.table import Action, Kind, Schedule

_RankRow = list[tuple[Kind, int]]


def forward_then_backward(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order (GPipe, arXiv 1811.06965).

    Every stage holds the activations of all microbatches at once.

    Raises:
        ValueError: a size below 1.
    """

    def row(stage: int) -> _RankRow:
        return _run(Kind.FORWARD, num_microbatches) + _run(Kind.BACKWARD, num_microbatches)

    return _build("forward_then_backward", num_stages, num_microbatches, row)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, 2104.04473).

    Stage s runs `num_stages - 1 - s` forwards ahead, then alternates, so that it holds the
    activations of at most `num_stages - s` microbatches. Fewer microbatches than stages are fine.

    Raises:
        ValueError: a size below 1.
    """

    def row(stage: int) -> _RankRow:
        ahead = min(num_stages - 1 - stage, num_microbatches)
        actions = _run(Kind.FORWARD, ahead)
        for microbatch in range(num_microbatches - ahead):
            actions.append((Kind.FORWARD, ahead + microbatch))
            actions.append((Kind.BACKWARD, microbatch))
        return actions + _run(Kind.BACKWARD, num_microbatches)[num_microbatches - ahead :]

    return _build("1f1b", num_stages, num_microbatches, row)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forwards only: evaluation.

    Raises:
        ValueError: a size below 1.
    """

    def row(stage: int) -> _RankRow:
        return _run(Kind.FORWARD, num_microbatches)

    return _build("forward_only", num_stages, num_microbatches, row, has_backward=False)


def _run(kind: Kind, count: int) -> _RankRow:
    return [(kind, microbatch) for microbatch in range(count)]


def _build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    row: Callable[[int], _RankRow],
    *,
    has_backward: bool = True,
) -> Schedule:
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    rows = [[Action(stage, kind, m) for kind, m in row(stage)] for stage in range(num_stages)]
    return finish(name, rows, num_microbatches, has_backward=has_backward)

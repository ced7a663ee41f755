"""Schedules with several stages on a rank, and whole backwards.

Stages go round the ranks: rank r runs stages r, r + p, r + 2p, ... Each is a pure function from
sizes to a table, for any number of microbatches.

    schedule = interleaved_1f1b(num_ranks=4, num_microbatches=8, stages_per_rank=2)
"""

from moe_pipeline.schedules.generators.rows import check_sizes, finish
from moe_pipeline.schedules.table import Action, Kind, Schedule


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """One forward, one backward over several stages of a rank (Megatron-LM, arXiv 2104.04473).

    Microbatches go in groups through all stages of a rank: of `num_ranks`, or of a few more where
    that makes them equal, as torch's do. The fill of the pipeline is `stages_per_rank` times
    shorter than that of 1F1B, for more activations at a time.

    Raises:
        ValueError: a size below 1.
    """
    rows = interleaved_rows(num_ranks, num_microbatches, stages_per_rank, lead=2)
    return finish(
        "interleaved_1f1b", rows, num_microbatches, num_stages=num_ranks * stages_per_rank
    )


def interleaved_rows(
    num_ranks: int, num_microbatches: int, stages_per_rank: int, *, lead: int
) -> list[list[Action]]:
    """Forwards and backwards of each rank; each runs `lead` more forwards ahead than the next.

    The last group may hold microbatches from `num_microbatches` on.
    """
    forwards = _in_groups(num_ranks, num_microbatches, stages_per_rank)
    ahead = (stages_per_rank - 1) * _group_size(num_ranks, num_microbatches)
    return [
        _one_and_one(rank, num_ranks, forwards, ahead + lead * (num_ranks - 1 - rank))
        for rank in range(num_ranks)
    ]


def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Schedule:
    """All microbatches through a rank's first stage, then its second, ... (arXiv 2211.05953).

    Backwards run in the reverse of the order of the forwards. Each stage's weights are used in one
    stretch, which is what makes it breadth-first; all activations are held.

    Raises:
        ValueError: a size below 1.
    """
    forwards = _in_turn(num_ranks, num_microbatches, stages_per_rank)
    rows = []
    for rank in range(num_ranks):
        order = [(chunk * num_ranks + rank, m) for chunk, m in forwards]
        row = [Action(stage, Kind.FORWARD, m) for stage, m in order]
        row += [Action(stage, Kind.BACKWARD, m) for stage, m in reversed(order)]
        rows.append(row)
    return finish("looped_bfs", rows, num_microbatches, num_stages=num_ranks * stages_per_rank)


def interleaved_forward_then_backward(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """Breadth-first, but with backwards as soon as the last stage is reached (Paddle#69944).

    Forwards run stage by stage as in `looped_bfs`. Once the last stages run, a backward of the
    same microbatch follows each forward, so that ranks hold about m (v - 1) + p stage inputs
    instead of m v: the "balanced memory" variant of interleaved forward-then-backward.

    Raises:
        ValueError: a size below 1.
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    # A group must not be shorter than the pipeline, or rank 0 would wait for its own later stage.
    size = max(num_microbatches, num_ranks)
    forwards = _in_turn(num_ranks, size, stages_per_rank)
    rows = []
    for rank in range(num_ranks):
        ahead = size * (stages_per_rank - 1) + num_ranks - 1 - rank
        rows.append(_one_and_one(rank, num_ranks, forwards, ahead))
    return finish(
        "interleaved_forward_then_backward",
        rows,
        num_microbatches,
        num_stages=num_ranks * stages_per_rank,
    )


def interleaved_forward_only(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> Schedule:
    """Forwards only, in the order of `interleaved_1f1b`: evaluation."""
    forwards = _in_groups(num_ranks, num_microbatches, stages_per_rank)
    rows = [
        [Action(chunk * num_ranks + rank, Kind.FORWARD, m) for chunk, m in forwards]
        for rank in range(num_ranks)
    ]
    return finish(
        "interleaved_forward_only",
        rows,
        num_microbatches,
        num_stages=num_ranks * stages_per_rank,
        has_backward=False,
    )


_Order = list[tuple[int, int]]


def _in_groups(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Order:
    """(chunk, microbatch) in the order of a rank's forwards, the last group filled up."""
    check_sizes(
        num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    size = _group_size(num_ranks, num_microbatches)
    return [
        (chunk, m)
        for start in range(0, num_microbatches, size)
        for chunk in range(stages_per_rank)
        for m in range(start, start + size)
    ]


def _group_size(num_ranks: int, num_microbatches: int) -> int:
    """Of equal groups not below `num_ranks`, or of fewer microbatches; else `num_ranks`."""
    count = max(1, num_microbatches // num_ranks)
    return num_ranks if num_microbatches % count else num_microbatches // count


def _in_turn(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Order:
    check_sizes(
        num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    return [(chunk, m) for chunk in range(stages_per_rank) for m in range(num_microbatches)]


def _one_and_one(rank: int, num_ranks: int, forwards: _Order, ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the remaining backwards.

    Backwards go through the chunks in reverse, and through the microbatches as the forwards do.
    """
    chunks = max(chunk for chunk, _ in forwards)
    fs = [Action(chunk * num_ranks + rank, Kind.FORWARD, m) for chunk, m in forwards]
    bs = [Action((chunks - chunk) * num_ranks + rank, Kind.BACKWARD, m) for chunk, m in forwards]
    ahead = min(ahead, len(fs))
    row = fs[:ahead]
    for forward, backward in zip(fs[ahead:], bs, strict=False):
        row += [forward, backward]
    return row + bs[len(fs) - ahead :]

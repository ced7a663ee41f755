"""Where the stages of a pipeline lie: what each schedule needs, read without torch.

Stage s of a loop is on rank s % pp; in a V, which two stages on a rank make, stages go to the last
rank and come back, so that the first and the last stage are on rank 0.

    assert stages_of_rank("zbv", pp=2, per_rank=2, rank=0) == (0, 3)
"""

LOOPED = frozenset(
    {
        "interleaved_1f1b",
        "interleaved_forward_then_backward",
        "interleaved_zero_bubble",
        "looped_bfs",
    }
)
"""Schedules of two stages and more on a rank, in a loop."""

IN_A_V = frozenset({"zbv", "v_half", "v_min", "dualpipe_v", "auto"})
"""Schedules of two stages on a rank, in a V."""


def stages_needed(schedule: str) -> tuple[int, int | None]:
    """The fewest and the most stages on a rank; None: any number."""
    if schedule in LOOPED:
        return 2, None
    return (2, 2) if schedule in IN_A_V else (1, 1)


def stages_of_rank(schedule: str, *, pp: int, per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages on a rank of the pipeline, the first one first."""
    if schedule in IN_A_V:
        return rank, 2 * pp - 1 - rank
    return tuple(rank + pp * turn for turn in range(per_rank))

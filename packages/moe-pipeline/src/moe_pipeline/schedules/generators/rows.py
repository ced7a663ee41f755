"""What all generators of schedules do with their rows: check sizes, drop, number, add transfers.

Dropping is why every schedule here takes any number of microbatches. A pattern that needs m to be
a multiple of something, or large, is made for more microbatches than wanted and the surplus is
taken out. What remains is right: no action needs another microbatch, ranks keep their order, and
so do links.

    assert [len(row) for row in finish("x", rows, num_microbatches=1).ranks] == [4, 4]
"""

from collections.abc import Iterable, Sequence

from moe_pipeline._checks import check_count
from moe_pipeline.schedules.table import Action, Schedule, add_transfers


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1 by their names."""
    for name, value in sizes.items():
        check_count(name, value)


def folded_rank(stage: int, num_ranks: int) -> int:
    """The rank of a stage when stages go to and fro, 0 1 2 2 1 0; two on a rank make a V."""
    turn, at = divmod(stage, num_ranks)
    return num_ranks - 1 - at if turn % 2 else at


def finish(
    name: str,
    rows: Sequence[Iterable[Action]],
    num_microbatches: int,
    *,
    num_stages: int | None = None,
    has_backward: bool = True,
    copies: int = 1,
    paired: Iterable[Action] = (),
) -> Schedule:
    """The schedule of compute-only `rows`, without microbatches from `num_microbatches` on.

    Args:
        name: of the schedule.
        rows: of each rank, for at least as many microbatches.
        num_microbatches: how many are kept.
        num_stages: None: one on each rank.
        has_backward: as in `Schedule`.
        copies: as in `Schedule`.
        paired: as in `Schedule`.
    """
    kept = tuple(tuple(a for a in row if a.microbatch < num_microbatches) for row in rows)
    return add_transfers(
        Schedule(
            name=name,
            num_stages=len(rows) if num_stages is None else num_stages,
            num_microbatches=num_microbatches,
            ranks=kept,
            has_backward=has_backward,
            copies=copies,
            paired=frozenset(a for a in paired if a.microbatch < num_microbatches),
        )
    )

"""A schedule as CSV, in the layout of `torch.distributed.pipelining`.

One row per rank and one action per cell; an empty cell means idle. torch exports the computations
only: `add_transfers` completes them.

    assert from_csv(to_csv(schedule)).ranks == schedule.ranks
"""

from collections.abc import Iterator
from pathlib import Path

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedule import Action, Kind, Schedule


def to_csv(schedule: Schedule) -> str:
    """One row per rank, its actions separated by commas."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read what `to_csv` or torch wrote.

    The numbers of stages and microbatches are one more than the largest that occur; there is a
    backward if any action is one.

    Raises:
        ScheduleError: no action at all, a cell that is not an action (row and cell are named), or
            a stage or microbatch number larger than the number of actions.
    """
    ranks = tuple(
        tuple(_cells(line, row)) for row, line in enumerate(text.splitlines()) if line.strip()
    )
    actions = [action for row in ranks for action in row]
    if not actions:
        raise ScheduleError(f"schedule {name} has no actions")
    num_stages = max(action.stage for action in actions) + 1
    num_microbatches = max(action.microbatch for action in actions) + 1
    if max(num_stages, num_microbatches) > len(actions):
        raise ScheduleError(
            f"schedule {name} has {len(actions)} actions, too few for {num_stages} stages and "
            f"{num_microbatches} microbatches; stages and microbatches are numbered from 0"
        )
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        ranks=ranks,
        has_backward=any(action.kind is Kind.BACKWARD for action in actions),
    )


def read_csv(path: Path | str) -> Schedule:
    """`from_csv` of a file; the schedule is named after it."""
    path = Path(path)
    return from_csv(path.read_text(encoding="utf-8"), name=path.stem)


def _cells(line: str, row: int) -> Iterator[Action]:
    for cell, text in enumerate(line.split(",")):
        if text.strip():
            try:
                yield Action.parse(text)
            except ScheduleError as error:
                raise ScheduleError(f"row {row}, cell {cell}: {error}") from error

"""A schedule as CSV, in the layout of `torch.distributed.pipelining`.

One row per rank and one action per cell; an empty cell means idle, and so does a line without any,
but for blank lines at the end, which are an editor's. torch exports the computations
with or without transfers: `add_transfers` completes the latter. What torch also writes and a
schedule here does not have is read so: `(2F1;3B0)OVERLAP_F_B` as its parts, in order, of which the
first is `paired` (pairs and copies are not written); actions on sharded parameters and waits for
sends (`1UNSHARD`, `0REDUCE_GRAD`, `0WAIT_SEND_F1`) not at all, since they say when a tensor moves,
not what is computed.

    assert from_csv(to_csv(schedule)).ranks == schedule.ranks
"""

import re
from collections.abc import Iterator
from pathlib import Path

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.table import Action, Kind, Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_SKIPPED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD|WAIT_SEND_[FB])\d*")


def to_csv(schedule: Schedule) -> str:
    """One row per rank, its actions separated by commas; a rank without actions has empty cells."""
    return "".join((",".join(map(str, row)) or ",") + "\n" for row in schedule.ranks)


def from_csv(text: str, *, name: str = "csv", copies: int = 1) -> Schedule:
    """Read what `to_csv` or torch wrote.

    The numbers of stages and microbatches are one more than the largest that occur; there is a
    backward if any action is one. `copies` is not in the file (`Schedule.copies`).

    Raises:
        ScheduleError: no action at all, a cell that is not an action (row and cell are named), or
            a stage or microbatch number larger than the number of actions.
    """
    paired: set[Action] = set()
    ranks = tuple(
        tuple(_cells(line, row, paired)) for row, line in enumerate(text.rstrip().splitlines())
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
        has_backward=any(action.kind in _BACKWARDS for action in actions),
        copies=copies,
        paired=frozenset(paired),
    )


def read_csv(path: Path | str, *, copies: int = 1) -> Schedule:
    """`from_csv` of a file; the schedule is named after it."""
    path = Path(path)
    return from_csv(path.read_text(encoding="utf-8-sig"), name=path.stem, copies=copies)


def _cells(line: str, row: int, paired: set[Action]) -> Iterator[Action]:
    for cell, text in enumerate(line.split(",")):
        together = _OVERLAPPED.fullmatch(text.strip())
        parts = together[1].split(";") if together else [text.strip()]
        for number, part in enumerate(parts):
            if not part or _SKIPPED.fullmatch(part):
                continue
            try:
                action = Action.parse(part)
            except ScheduleError as error:
                raise ScheduleError(f"row {row}, cell {cell}: {error}") from error
            if number + 1 < len(parts):
                paired.add(action)
            yield action

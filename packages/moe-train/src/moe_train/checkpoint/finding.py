"""Which checkpoint a run goes on from: the one that is named, or the newest valid one.

source = find_checkpoint(Path("runs/a"), "latest")
"""

import logging
from pathlib import Path
from typing import overload

from moe_train.errors import TrainValueError
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.folders import checked_checkpoints, numbered_checkpoints
from unified_ckpt.plans.checkpoint import is_stored

logger = logging.getLogger(__name__)


def nothing_to_resume(folder: Path | Location) -> TrainValueError:
    """The error for a folder without a complete checkpoint; names incomplete ones."""
    left = ", ".join(path.name for path in numbered_checkpoints(folder))
    first = f"move {left} away and " if left else ""
    return TrainValueError(
        f"--resume: {folder} holds no complete checkpoint; {first}start without --resume, or name "
        "one"
    )


def find_checkpoint(folder: Path | Location, resume: str) -> Path | Location | None:
    """The checkpoint that `--resume` names: none for "", the newest valid one for "latest".

    The name of another run's folder stands for its newest valid one.

    Raises:
        ValueError: there is none.
    """
    if not resume:
        return None
    if resume != "latest":
        return _named(as_target("--resume", resume))
    found = newest_checkpoint(folder)
    if found is None:
        raise nothing_to_resume(folder)
    return found


def _named(place: Path | Location) -> Path | Location:
    """A checkpoint, or the newest valid one of a run's folder."""
    if isinstance(place, Location) and is_stored(place):
        return place
    newest = newest_checkpoint(place)
    if newest is not None:
        return newest
    if isinstance(place, Path) and place.is_dir():
        return place  # without a manifest: what it lacks is said when it is read
    raise TrainValueError(f"--resume {place}: no such folder; name a checkpoint-N folder")


@overload
def newest_checkpoint(folder: Path) -> Path | None: ...
@overload
def newest_checkpoint(folder: Path | Location) -> Path | Location | None: ...
def newest_checkpoint(folder: Path | Location) -> Path | Location | None:
    """The newest valid checkpoint of a run, or None; a line of the log for each damaged newer one.

    Not collective.

    Raises:
        CheckpointError: the folder cannot be listed, or its store does not answer.
    """

    def warn(line: str) -> None:
        logger.warning("warning: %s", line)

    return next((path for path, _ in checked_checkpoints(folder, passed_over=warn)), None)

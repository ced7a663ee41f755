"""A source that is used up: it is hidden while its bytes move, and removed at the end.

While parts of its files are freed a directory is no model any more, so it stands under a hidden
name that no program loads by mistake, until the output is complete. Headers stay to the end: an
interrupted move is planned again from them, and goes on.

    hidden = hide_source(Path("model"), Path("model"))      # .model.moving
    remove_source(hidden, Path("model"), keep=["optimizer.pt"])
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weight_convert.errors import WeightConvertError
from weight_convert.staging import free_range, fsync_path, hidden_sibling


def check_movable(source: Path, names: Sequence[str]) -> None:
    """Raise unless parts of these files can be freed, and nobody else has them."""
    for name in names:
        path = source / name
        if path.is_symlink() or path.stat().st_nlink > 1:
            raise WeightConvertError(
                f"{path} is a link, so its bytes belong to another place too, such as a download "
                f"cache; convert without moving"
            )
        fd = os.open(path, os.O_RDWR)
        try:
            free_range(fd, 0, 0)
        except OSError as error:
            raise WeightConvertError(
                f"{path} cannot be freed bit by bit ({error}); moving needs Linux and a file "
                f"system with holes (ext4, xfs, btrfs, tmpfs); convert without moving"
            ) from error
        finally:
            os.close(fd)


def check_way(source: Path, target: Path) -> None:
    """Raise unless a source can be hidden under its own name, and the target stays where it is."""
    if source.is_symlink():
        raise WeightConvertError(
            f"{source} is a link, so its files belong to another place too; move that directory "
            f"itself ({source.resolve()}), or convert without moving"
        )
    if source == Path() or ".." in source.parts:
        raise WeightConvertError(
            f"{source} cannot be renamed by that name; to move it give its path from outside, "
            f"without '..' ({source.resolve()})"
        )
    if target.resolve().is_relative_to(source.resolve()):
        raise WeightConvertError(
            f"{target} is inside of {source}, which a move removes; choose a target outside of it"
        )


def place_of(source: Path, job: Mapping[str, Any] | None) -> Path:
    """Where the source of a job stands: under its name, or hidden if its move was interrupted.

    Raises:
        WeightConvertError: it is hidden, and this job is not the one that was moving it.
    """
    hidden = hidden_sibling(source.absolute(), "moving")
    if os.path.lexists(source) or not hidden.is_dir():
        return source
    if job is None or not job["move"] or job["source"] != str(source.absolute()):
        raise WeightConvertError(
            f"a move of {source} was interrupted, and parts of it stand in its target only; go on "
            f"with the same command and --resume"
        )
    return hidden


def hide_source(source: Path, place: Path) -> Path:
    """Hide a source that does not stand hidden yet; return its place."""
    hidden = hidden_sibling(source.absolute(), "moving")
    if place != hidden:
        if os.path.lexists(hidden):
            raise WeightConvertError(
                f"{hidden} is what an interrupted move of another {source.name} left; end that "
                f"one first"
            )
        source.rename(hidden)
        fsync_path(hidden.parent)
    return hidden


def remove_source(hidden: Path, source: Path, keep: Sequence[str]) -> None:
    """Remove a source that was moved; what the output does not hold goes back to its name."""
    for name in keep:
        if os.path.lexists(hidden / name):
            source.mkdir(exist_ok=True)
            (hidden / name).rename(source / name)
    if hidden.is_dir():
        shutil.rmtree(hidden)
    fsync_path(hidden.parent)

"""A directory that appears under its name complete, or not at all.

Files are written into a hidden sibling directory, made durable, and published by one rename. Only
one process can hold the sibling, so two conversions to one target cannot mix; what a killed
process left behind is removed by the next one, or kept by one that goes on with it.

    with staged_directory(Path("out/model")) as temporary:
        (temporary / "config.json").write_text("{}")
    # out/model exists now; after an exception neither it nor the temporary directory would

Invariant: `target` is never visible with less than its full, fsynced content (given that the caller
fsyncs the files that it writes; directories are fsynced here).
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weight_convert.errors import TargetExistsError


@contextmanager
def staged_directory(target: Path, *, keep: bool = False, resume: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` when the block ends without error.

    Args:
        target: the directory to publish.
        keep: leave what is written when the block fails.
        resume: leave what an earlier run wrote; else the directory is empty at first.

    Raises:
        TargetExistsError: `target` exists, before or at the end, or another process is writing it.
    """
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_sibling(target, "partial")
    lock_fd = _lock_directory(temporary, target)
    published = False
    try:
        if not resume:
            _remove_content(temporary)
        refuse_existing(target)  # the process that held the lock before us may have published it
        yield temporary
        _publish(temporary, target)
        published = True
        fsync_path(target.parent)  # the rename itself
    finally:
        if not published and not keep:
            shutil.rmtree(temporary)
        os.close(lock_fd)


def hidden_sibling(path: Path, kind: str) -> Path:
    """The hidden name beside `path` under which something of this `kind` is kept meanwhile."""
    return path.parent / f".{path.name}.{kind}"


def refuse_existing(target: Path) -> None:
    """Raise when something stands at `target`, be it an empty directory or a broken link."""
    if os.path.lexists(target):
        raise TargetExistsError(f"{target} exists; choose another target or remove it first")


def fsync_path(path: Path) -> None:
    """Make a file or directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock_directory(temporary: Path, target: Path) -> int:
    """Create the directory if needed and lock it; return the descriptor that holds the lock."""
    temporary.mkdir(exist_ok=True)
    fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(temporary)):
            raise BlockingIOError  # it was published between open and lock
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        raise TargetExistsError(
            f"another process is writing {target} (through {temporary}); "
            f"wait for it or choose another target"
        ) from None
    return fd


def _remove_content(directory: Path) -> None:
    """Remove what a killed process left in the temporary directory."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _publish(temporary: Path, target: Path) -> None:
    """Fsync the directories and rename."""
    for folder, _, _ in os.walk(temporary):
        fsync_path(Path(folder))
    refuse_existing(target)
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise TargetExistsError(f"{target} was created by someone else meanwhile") from error
        raise

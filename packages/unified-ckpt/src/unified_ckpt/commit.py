"""The moment at which a checkpoint exists: one rename of a finished, fsynced directory.

A save fills a hidden sibling of its target, `.NAME.unified-ckpt-tmp-TOKEN`. The rename that
publishes it is the only step that touches the target's name, so under that name there is always the
old checkpoint, the new one, or nothing. While a save runs, its writer holds a lock on the hidden
directory, by which leftovers of killed saves are told from saves that are still running.

Replacing swaps the two directories in one step (`renameat2`). Where a file system cannot, the old
one steps aside as `.NAME.unified-ckpt-old-TOKEN` first; a crash between the two renames leaves it
there, and `clean_leftovers`, which the next save calls, gives it its name back.

    staging = Staging.make(Path("run/checkpoint-10"))
    ...  # every rank writes and fsyncs files in staging.folder
    staging.publish()
"""

import errno
import fcntl
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from unified_ckpt.files import (
    exchange,
    make_folder,
    make_folders,
    remove_tree,
    rename,
    sync_folder,
    sync_tree,
)
from unified_ckpt.manifest import MANIFEST_NAME

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.unified-ckpt-(?P<kind>tmp|old)-[0-9a-f]{16}\Z")
_UNLOCKED_AGE_S = 24 * 3600.0  # where locks do not work, a leftover this old counts as dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """A hidden directory that becomes `target`; owned by one process, filled by all ranks."""

    folder: Path
    target: Path
    lock_fd: int

    @classmethod
    def make(cls, target: Path) -> "Staging":
        """Make the directory, durable parents included, and lock it.

        Raises:
            ValueError: the target exists and is no checkpoint, so it will not be replaced.
        """
        check_replaceable(target)
        make_folders(target.parent)
        folder = hidden_name(target, "tmp")
        make_folder(folder)
        return cls(folder=folder, target=target, lock_fd=_lock_new(folder))

    def publish(self) -> bool:
        """Make everything durable, then give it its name; return whether a checkpoint was replaced.

        All ranks must have fsynced their files.
        """
        sync_tree(self.folder)
        replaced = self.target.exists()
        if not replaced:
            rename(self.folder, self.target)
        elif not exchange(self.folder, self.target):
            self._step_aside()
        sync_folder(self.target.parent)
        return replaced

    def _step_aside(self) -> None:
        """Replace where names cannot be swapped; see the module for a crash in between."""
        aside = hidden_name(self.target, "old")
        rename(self.target, aside)
        try:
            rename(self.folder, self.target)
        except OSError:
            rename(aside, self.target)
            raise
        sync_folder(self.target.parent)
        remove_tree(aside)

    def close(self) -> None:
        """Remove what the hidden directory still holds, and release the lock.

        That is a save that failed, or the checkpoint that was replaced.
        """
        remove_tree(self.folder)
        os.close(self.lock_fd)


def hidden_name(target: Path, kind: str) -> Path:
    """Return a fresh hidden sibling of a directory; `kind` is `tmp` or `old`."""
    return target.with_name(f".{target.name}.unified-ckpt-{kind}-{secrets.token_hex(8)}")


def check_replaceable(target: Path) -> None:
    """Refuse to replace what is not a checkpoint.

    Raises:
        ValueError: something stands under the target's name that a save must not delete.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} exists and is not a directory; choose another checkpoint_id")
    if not (target / MANIFEST_NAME).is_file() and any(target.iterdir()):
        raise ValueError(
            f"{target} exists and has no {MANIFEST_NAME}, so it is not a checkpoint that may be "
            "replaced; remove it yourself or choose another checkpoint_id"
        )


def clean_leftovers(parent: Path) -> list[Path]:
    """Remove what killed saves left in a directory; return the paths removed or given back.

    Directories that a running save holds are left alone.
    """
    if not parent.is_dir():
        return []
    done = []
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.match(path.name)
        if match is None or not path.is_dir() or _is_alive(path):
            continue
        target = parent / match["name"]
        if match["kind"] == "old" and not target.exists():
            rename(path, target)
            sync_folder(parent)
        else:
            remove_tree(path)
        done.append(path)
    return done


def _lock_new(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):
            os.close(fd)
            raise
    return fd


def _is_alive(folder: Path) -> bool:
    """Whether a running save holds the directory; where locks do not work, whether it is young."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return time.time() - os.fstat(fd).st_mtime < _UNLOCKED_AGE_S
    finally:
        os.close(fd)
    return False

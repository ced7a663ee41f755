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

import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unified_ckpt.errors import CheckpointValueError, KeptFilesWarning
from unified_ckpt.files import (
    exchange,
    lock_folder,
    make_folder,
    make_folders,
    remove_tree,
    rename,
    sync_folder,
    sync_tree,
    unlock_folder,
)
from unified_ckpt.files.format import MANIFEST_NAME, encode_manifest
from unified_ckpt.saving.commit.kept_files import keep_files
from unified_ckpt.saving.commit.writer import write_blobs

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.unified-ckpt-(?P<kind>tmp|old)-[0-9a-f]{16}\Z")
_UNLOCKED_AGE_S = 24 * 3600.0  # where locks do not work, a leftover this old counts as dead
_MAX_NAME_BYTES = 255
_MAX_ATTEMPTS = 100


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
            CheckpointValueError: the target exists and is no checkpoint, so it is not replaced; or
                its name leaves no room for that of the hidden directory.
        """
        check_replaceable(target)
        _check_name_length(target)
        make_folders(target.parent)
        for _ in range(_MAX_ATTEMPTS):
            folder = hidden_name(target, "tmp")
            make_folder(folder)
            lock_fd = _lock_new(folder)
            if lock_fd is not None:
                return cls(folder=folder, target=target, lock_fd=lock_fd)
        raise OSError(f"something removes every directory that is made in {target.parent}")

    def commit(
        self, records: Mapping[str, bytes], keys: Callable[[], Mapping[str, Mapping[str, str]]]
    ) -> bool:
        """Write the manifest of all files, then publish; return as `publish`.

        Args:
            records: packed record of each file, by name.
            keys: makes the file of each stored tensor, by part; of a small manifest not called.
        """
        write_blobs(encode_manifest(records, keys), self.folder)
        return self.publish()

    def publish(self) -> bool:
        """Make everything durable, then give it its name; return whether a checkpoint was replaced.

        All ranks must have fsynced their files. What others put into the checkpoint that is
        replaced stands in the new one as well, which a `KeptFilesWarning` says.

        Raises:
            CheckpointValueError: meanwhile the target's name is that of something else; or others
                put a file there whose name the new checkpoint needs.
        """
        check_replaceable(self.target)
        kept = keep_files(self.target, self.folder) if self.target.exists() else ()
        sync_tree(self.folder)
        check_replaceable(self.target)
        replaced = self.target.exists()
        if not replaced:
            rename(self.folder, self.target)
        elif exchange(self.folder, self.target):
            kept += self._keep_late(self.folder, kept)
        else:
            kept += self._step_aside(kept)
        sync_folder(self.target.parent)
        if kept:
            warnings.warn(
                f"{self.target} was replaced; it keeps the files {sorted(kept)}, which no save "
                "had written",
                KeptFilesWarning,
                stacklevel=2,
            )
        return replaced

    def _keep_late(self, old: Path, before: tuple[str, ...]) -> tuple[str, ...]:
        """Keep what was put into the old directory while it was being replaced."""
        kept = keep_files(old, self.target, published_with=before)
        if kept:
            sync_tree(self.target)
        return kept

    def _step_aside(self, before: tuple[str, ...]) -> tuple[str, ...]:
        """Replace where names cannot be swapped; see the module for a crash in between."""
        aside = hidden_name(self.target, "old")
        rename(self.target, aside)
        try:
            rename(self.folder, self.target)
        except OSError:
            rename(aside, self.target)
            raise
        sync_folder(self.target.parent)
        kept = self._keep_late(aside, before)
        remove_tree(aside)
        return kept

    def close(self) -> None:
        """Remove what the hidden directory still holds, and release the lock.

        That is a save that failed, or the checkpoint that was replaced.
        """
        remove_tree(self.folder)
        unlock_folder(self.lock_fd)


def hidden_name(target: Path, kind: str) -> Path:
    """Return a fresh hidden sibling of a directory; `kind` is `tmp` or `old`."""
    return target.with_name(f".{target.name}.unified-ckpt-{kind}-{secrets.token_hex(8)}")


def check_replaceable(target: Path) -> None:
    """Refuse to replace what is not a checkpoint."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointValueError(f"{target} exists and is not a directory; choose another name")
    if not (target / MANIFEST_NAME).is_file() and any(target.iterdir()):
        raise CheckpointValueError(
            f"{target} exists and has no {MANIFEST_NAME}, so it is not a checkpoint that may be "
            "replaced; remove it yourself or choose another checkpoint_id"
        )


def _check_name_length(target: Path) -> None:
    length, hidden = (len(os.fsencode(path.name)) for path in (target, hidden_name(target, "tmp")))
    if hidden > _MAX_NAME_BYTES:
        raise CheckpointValueError(
            f"the name {target.name[:40]!r}... has {length} bytes; choose a checkpoint_id whose "
            f"last name has at most {_MAX_NAME_BYTES - hidden + length}, since the directory that "
            "becomes it has a longer one"
        )


def clean_leftovers(parent: Path) -> list[Path]:
    """Remove what killed saves left in a directory; return the paths removed or given back.

    Directories that a running save holds are left alone, and those that this user may not touch.
    """
    if not parent.is_dir():
        return []
    done = []
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.match(path.name)
        if match is None or not path.is_dir():
            continue
        old = match["kind"] == "old"
        lock_fd = _lock_dead(path, any_age=old)  # for moments only it is between two renames
        if lock_fd is None:
            continue
        try:
            _clean(path, parent / match["name"], old=old)
        finally:
            unlock_folder(lock_fd)
        if not path.is_dir():
            done.append(path)
    return done


def _clean(path: Path, target: Path, *, old: bool) -> None:
    if not old or target.exists():
        remove_tree(path)
        return
    with suppress(PermissionError):  # another user's, who gets it back with a save of his own
        rename(path, target)
        sync_folder(target.parent)


def _lock_new(folder: Path) -> int | None:
    """Lock a directory just made; None if another process took it for a leftover before that."""
    try:
        fd, _ = lock_folder(folder)
    except (BlockingIOError, FileNotFoundError):
        return None
    try:
        if os.path.samestat(os.fstat(fd), folder.stat()):
            return fd
    except FileNotFoundError:
        pass  # removed before the lock was there
    unlock_folder(fd)
    return None


def _lock_dead(folder: Path, *, any_age: bool) -> int | None:
    """Lock a leftover, so that its maker or another cleaner sees it; None if it is not to go.

    That is one that a running save holds (where locks do not work, a young one, unless `any_age`),
    that is gone by now, or that this user may not open.
    """
    try:
        fd, locked = lock_folder(folder)
    except (BlockingIOError, FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    if not (locked or any_age) and time.time() - os.fstat(fd).st_mtime < _UNLOCKED_AGE_S:
        unlock_folder(fd)
        return None
    return fd

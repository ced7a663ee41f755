"""A folder held by its descriptor: what is read from it is of one folder, whatever its name shows.

A save replaces a checkpoint by giving its name to another folder. A reader that opened the old one
by descriptor, and its files relative to that, reads old bytes or finds files gone; never new ones.
Only regular files are opened, so that a FIFO stops nobody.

    with OpenFolder(Path("run/checkpoint-10")) as folder:
        raw = folder.read("manifest.json")
"""

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from unified_ckpt.errors import CorruptCheckpointError, LoadError, StoreError
from unified_ckpt.files.system import PositionedFile

_OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # says nothing about the checkpoint
_DAMAGE = {
    errno.EACCES,
    errno.EIO,
    errno.ELOOP,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
    errno.ESTALE,
}
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


class Place(Protocol):
    """What a folder is called: a path, or a location in a store."""

    @property
    def name(self) -> str:
        """The last of its names."""

    def __truediv__(self, name: str, /) -> "Place": ...


class ReadFolder(Protocol):
    """A folder opened for reading, wherever it lies; see `OpenFolder` for what each call does."""

    @property
    def path(self) -> Place:
        """What it is called."""

    def open(self, name: str) -> AbstractContextManager[int | PositionedFile]:
        """Open a file for `read_at` and `read_runs`."""

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None if there is none."""

    def listed(self) -> list[str]:
        """Return the names in it."""

    def names(self) -> set[str]:
        """Return the names of all files in it and below."""

    def leads_here(self) -> bool:
        """Whether its name still leads to it."""

    def changed_file(self) -> str | None:
        """Return a file that was read and has other contents by now."""

    def close(self) -> None:
        """Give back what it holds."""


class OpenFolder(AbstractContextManager["OpenFolder"]):
    """A folder opened for reading, as descriptor `fd`; it remembers which files it opened.

    Raises:
        LoadError: there is no such folder.
        StoreError: (a LoadError) this process has no descriptor left.
        CorruptCheckpointError: it cannot be opened for another reason (EACCES, EIO, ELOOP).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (*_NOT_THERE, ValueError) as error:
            raise LoadError(f"{path}: no such checkpoint directory") from error
        except OSError as error:
            raise read_error(path, error) from error
        self._finalize = weakref.finalize(self, os.close, self.fd)
        self._identity = os.fstat(self.fd)
        self._seen: dict[str, tuple[int, int, int]] = {}

    def close(self) -> None:
        """Give the descriptor back."""
        self._finalize()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Open a regular file for positioned reads.

        Raises:
            CorruptCheckpointError: it is missing, no regular file or cannot be read, also in the
                body of the `with`.
            StoreError: this process has no descriptor or memory left.
        """
        path = self.path / name
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except OSError as error:
            raise read_error(path, error) from error
        try:
            found = os.fstat(fd)
            _check_regular(found, path)
            self._seen.setdefault(name, _signature(found))
            yield fd
        except OSError as error:
            if error.errno not in _DAMAGE | _OUT_OF_MEANS:
                raise
            raise read_error(path, error) from error
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        """Return the bytes of a regular file; raises as `open`."""
        with self.open(name) as fd, open(fd, "rb", closefd=False) as file:
            return file.read()

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None if there is none of that name.

        Raises:
            CorruptCheckpointError: it is no regular file, or the file system cannot say.
        """
        try:
            found = os.stat(name, dir_fd=self.fd)
        except _NOT_THERE:
            return None
        except OSError as error:
            raise read_error(self.path / name, error) from error
        _check_regular(found, self.path / name)
        return found.st_size

    def listed(self) -> list[str]:
        """Return the names in it."""
        try:
            return os.listdir(self.fd)
        except OSError as error:
            raise read_error(self.path, error) from error

    def names(self, *, of_any_kind: bool = False) -> set[str]:
        """Return the names of all files in it and below, relative to it.

        Args:
            of_any_kind: also of what is neither a regular file nor a folder.
        """
        found = set()
        for folder, folders, names, fd in os.fwalk(".", dir_fd=self.fd):
            for name in [*names, *folders]:
                with suppress(OSError):
                    mode = os.stat(name, dir_fd=fd, follow_symlinks=not of_any_kind).st_mode
                    if stat.S_ISREG(mode) or (of_any_kind and not stat.S_ISDIR(mode)):
                        found.add(os.path.normpath(os.path.join(folder, name)))
        return found

    def leads_here(self) -> bool:
        """Whether its path still leads to it."""
        try:
            return os.path.samestat(os.stat(self.path), self._identity)
        except _NOT_THERE:
            return False
        except OSError as error:
            return error.errno != errno.ESTALE

    def changed_file(self) -> str | None:
        """Return a file that was read and has other contents by now; one that is gone has none."""
        for name, signature in self._seen.items():
            with suppress(OSError):
                if _signature(os.stat(name, dir_fd=self.fd)) != signature:
                    return name
        return None


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpointError(f"{path}: is not a regular file")


def _signature(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_error(path: Path, error: OSError) -> LoadError:
    """Say what an error of the system means for a checkpoint that is read."""
    if isinstance(error, _NOT_THERE):
        return CorruptCheckpointError(f"{path}: file is missing")
    if error.errno in _OUT_OF_MEANS:
        return StoreError(f"{path}: not opened: {error.strerror}; raise the limit of this process")
    return CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}")


def is_damage(error: OSError) -> bool:
    """Whether an error of the system counts as damage of what is read."""
    return error.errno in _DAMAGE

"""Objects as files of a folder, also on a network file system that several machines share.

No file is written by two processes, none changes once it has its name, and no exchange of names or
cache coherence beyond close-to-open is needed: an object is written under a hidden name, fsynced,
closed and renamed.

`swap` compares and renames under a lock, which the system takes from a process that dies. Where a
file system has no locks (Lustre without `flock`), two jobs that save one checkpoint at the same
moment are told apart only if it is a new one.

    store = LocalStore("shared/run")
    store.swap("checkpoint-10/manifest.json", b"{}", old=None)
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from unified_ckpt.files import (
    BATCH_BYTES,
    Buffer,
    make_folders,
    open_for_write,
    read_at,
    remove_tree,
    rename,
    sync_file,
    sync_folder,
    write_at,
)
from unified_ckpt.files.storage.protocol import SWAP_PREFIX, Fetched

_MEANS_ELSE = re.compile(r"[%#?\x00-\x1f]")  # in a URL; all else stays as people read it
_HIDDEN, _LOCK = ".unified-ckpt-tmp-", ".unified-ckpt-lock-"


class LocalStore:
    """Objects as the files of a folder; a key is a path relative to it.

    Args:
        root: the folder; it is made when the first object is written.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(os.path.realpath(root))

    @property
    def url(self) -> str:
        """The folder as a URL."""
        return "file://" + escaped(str(self.root).rstrip("/"))

    def upload(self, key: str, buffers: Iterable[Buffer], *, num_bytes: int) -> None:
        """Write a file under a hidden name, then rename it."""
        path = self.root / key
        hidden = self._write_hidden(path, buffers, _HIDDEN)
        rename(hidden, path)
        sync_folder(path.parent)

    def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
        """Replace a file if its contents have the version `old`."""
        path = self.root / key
        hidden = self._write_hidden(path, [data], SWAP_PREFIX)
        try:
            with _locked(path):
                found = self.fetch(key)
                if (None if found is None else found.version) != old:
                    return False
                if old is None:
                    os.link(hidden, path)
                else:
                    rename(hidden, path)
                sync_folder(path.parent)
                return True
        except FileExistsError:  # of the link: without locks another one came first
            return False
        finally:
            remove_tree(hidden)

    def fetch(self, key: str) -> Fetched | None:
        """Read a whole file."""
        try:
            data = (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Fetched(data=data, version=hashlib.blake2b(data, digest_size=16).hexdigest())

    def read(self, key: str, start: int, num_bytes: int) -> Buffer:
        """Read bytes of a file."""
        buffer = memoryview(bytearray(num_bytes))
        fd = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return buffer[: read_at(fd, [buffer], start)]
        finally:
            os.close(fd)

    def size(self, key: str) -> int | None:
        """Return the size of a file."""
        try:
            return (self.root / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def keys(self, prefix: str) -> Sequence[str]:
        """List the files in a folder and below, also those being written."""
        found = []
        for folder, _, names in os.walk(self.root / prefix):
            place = Path(folder).relative_to(self.root)
            found += [str(place / name) for name in names if not name.startswith(_LOCK)]
        return sorted(found)

    def children(self, prefix: str) -> Sequence[str]:
        """List the names in a folder."""
        try:
            names = os.listdir(self.root / prefix)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.startswith((_HIDDEN, SWAP_PREFIX, _LOCK)))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files, and the folders that are empty then."""
        for key in keys:
            remove_tree(self.root / key)
        for path in (self.root / key for key in keys):
            if os.path.lexists(path):  # no other process writes what is to be deleted
                raise PermissionError(errno.EACCES, "not deleted; who may write there?", str(path))
        for folder in sorted({(self.root / key).parent for key in keys}, reverse=True):
            while folder != self.root and folder.exists():
                _remove_if_empty(folder)
                folder = folder.parent

    def _write_hidden(self, path: Path, buffers: Iterable[Buffer], prefix: str) -> Path:
        make_folders(path.parent)
        hidden = path.with_name(f"{prefix}{secrets.token_hex(8)}")
        try:
            with open_for_write(hidden) as fd:
                start = 0
                for batch in _batches(buffers):
                    write_at(fd, batch, start)
                    start += sum(map(len, batch))
                sync_file(fd)
        except BaseException:
            remove_tree(hidden)
            raise
        return hidden


def escaped(path: str) -> str:
    """Write a path as a `file://` URL has it, so that what reads the URL finds the same path."""
    return _MEANS_ELSE.sub(lambda found: quote(found[0]), path)


def _batches(buffers: Iterable[Buffer]) -> Iterable[list[Buffer]]:
    batch: list[Buffer] = []
    for buffer in buffers:
        batch.append(buffer)
        if sum(map(len, batch)) >= BATCH_BYTES:
            yield batch
            batch = []
    yield batch


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file's name, where the file system has locks."""
    lock = path.with_name(f"{_LOCK}{path.name}")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _leads_to(lock, fd):  # else its folder was deleted meanwhile
                yield
                return
        finally:
            os.close(fd)


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds locks at most."""
    with suppress(OSError):
        if all(name.startswith(_LOCK) for name in os.listdir(folder)):
            remove_tree(folder)

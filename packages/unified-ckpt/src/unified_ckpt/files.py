"""System calls on files: positioned writes and reads that finish, durable names, atomic exchange.

Every byte of a checkpoint passes through `write_at` and `read_at`. A name is durable once its
folder has been fsynced.

    with open_for_write(path) as fd:
        write_at(fd, [b"header", b"data"], 0)
        os.fsync(fd)
"""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

Buffer = bytes | memoryview


@contextmanager
def open_for_write(path: Path) -> Iterator[int]:
    """Open a file for positioned writes, making it if needed and never cutting it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_for_read(path: Path) -> Iterator[int]:
    """Open a file for positioned reads."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def write_at(fd: int, buffers: Sequence[Buffer], start: int) -> None:
    """Write all bytes of the buffers one after the other from byte `start`.

    Raises:
        OSError: as the system call, for example when the disk is full.
    """
    left = [memoryview(b).cast("B") for b in buffers if len(b)]
    left.reverse()
    while left:
        batch = left[-1 : -_MAX_BUFFERS - 1 : -1]
        done = os.pwritev(fd, batch, start)
        start += done
        _drop(left, done)


def read_at(fd: int, buffers: Sequence[memoryview], start: int) -> int:
    """Fill the buffers from byte `start`; return the bytes read, fewer only at the file's end."""
    left = [b for b in buffers if len(b)]
    left.reverse()
    total = 0
    while left:
        batch = left[-1 : -_MAX_BUFFERS - 1 : -1]
        done = os.preadv(fd, batch, start + total)
        if done == 0:
            return total
        total += done
        _drop(left, done)
    return total


def _drop(left: list[memoryview], num_bytes: int) -> None:
    """Remove the first bytes of reversed buffers."""
    while num_bytes:
        head = left.pop()
        if len(head) > num_bytes:
            left.append(head[num_bytes:])
            return
        num_bytes -= len(head)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Make the names in a folder and in all folders below it durable."""
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


def make_folders(path: Path) -> None:
    """Make a folder and its parents, each durable in its parent."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the folder's file system."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux `renameat2`); False where the file system cannot.

    Raises:
        OSError: the swap failed for another reason.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def remove_tree(path: Path) -> None:
    """Remove a folder as far as permissions allow; what stays has a hidden name and no reader."""
    shutil.rmtree(path, ignore_errors=True)

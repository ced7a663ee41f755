"""System calls on files: positioned writes and reads that finish, durable names, atomic exchange.

Nothing else in this package changes the file system, so that the order of these calls is all there
is to know about a crash; `benchmarks/unified_ckpt_power_loss.py` records and replays it. A name is
durable once its folder has been fsynced.

    with open_for_write(path) as fd:
        write_at(fd, [b"header", b"data"], 0)
        sync_file(fd)
"""

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_LOCK_POLL_S = 0.05
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

BATCH_BYTES = 16 * 1024 * 1024  # of one read or write: enough to keep a disk busy

Buffer = bytes | memoryview


class PositionedFile(Protocol):
    """A file that is read by position, but not by a descriptor."""

    def num_bytes(self) -> int:
        """As the function `size_of`."""

    def read_at(self, buffers: Sequence[memoryview], start: int) -> int:
        """As the function `read_at`."""

    def read_runs(self, buffer: memoryview, starts: Iterable[int], run_bytes: int) -> int:
        """As the function `read_runs`."""


@contextmanager
def open_for_write(path: Path) -> Iterator[int]:
    """Open a file for positioned writes, making it if needed and never cutting it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def write_at(fd: int, buffers: Sequence[Buffer], start: int) -> None:
    """Write all bytes of the buffers one after the other from byte `start`."""
    left = [memoryview(b).cast("B") for b in buffers if len(b)]
    left.reverse()
    while left:
        batch = left[-1 : -_MAX_BUFFERS - 1 : -1]
        done = os.pwritev(fd, batch, start)
        start += done
        _drop(left, done)


def read_at(fd: int | PositionedFile, buffers: Sequence[memoryview], start: int) -> int:
    """Fill the buffers from byte `start`; return the bytes read, fewer only at the file's end."""
    if not isinstance(fd, int):
        return fd.read_at(buffers, start)
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


def read_runs(
    fd: int | PositionedFile, buffer: memoryview, starts: Iterable[int], run_bytes: int
) -> int:
    """Fill a buffer with equally long runs of a file, one call each; return the bytes read.

    Stops at the first run that the file does not hold in full.
    """
    if not isinstance(fd, int):
        return fd.read_runs(buffer, starts, run_bytes)
    preadv = os.preadv  # every name that is looked up here costs as much as copying a kilobyte
    done = 0
    for start in starts:
        end = done + run_bytes
        got = preadv(fd, (buffer[done:end],), start)
        if got != run_bytes:
            got += read_at(fd, [buffer[done + got : end]], start + got)
            if got != run_bytes:
                return done + got
        done = end
    return done


def _drop(left: list[memoryview], num_bytes: int) -> None:
    """Remove the first bytes of reversed buffers."""
    while num_bytes:
        head = left.pop()
        if len(head) > num_bytes:
            left.append(head[num_bytes:])
            return
        num_bytes -= len(head)


def size_of(fd: int | PositionedFile) -> int:
    """Return the bytes of an open file."""
    return os.fstat(fd).st_size if isinstance(fd, int) else fd.num_bytes()


def sync_file(fd: int) -> None:
    """Make a file's bytes and size durable; its name needs `sync_folder`."""
    os.fsync(fd)


def begin_writeback(fd: int, start: int, num_bytes: int) -> None:
    """Ask the kernel to start writing a range to the disk, so that a later fsync waits less.

    A hint: where the file system or the C library has no `sync_file_range`, nothing happens.
    """
    call = _libc_function("sync_file_range")
    if call is not None and num_bytes:
        call(fd, ctypes.c_int64(start), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


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


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder; its name is not durable yet."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not (exist_ok and path.is_dir()):
            raise


def make_folders(path: Path) -> None:
    """Make a folder and its parents, each durable in its parent."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        make_folder(folder, exist_ok=True)
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder another name in one step; not durable yet."""
    os.rename(old, new)


def link_file(folder_fd: int, name: str, new: Path) -> bool:
    """Give a file of an open folder a second name; False where it can have none."""
    try:
        os.link(name, new, src_dir_fd=folder_fd, follow_symlinks=False)
    except PermissionError:
        return False
    except OSError as error:
        if error.errno in (*_NOT_SUPPORTED, errno.EXDEV, errno.EMLINK):
            return False
        raise
    return True


def lock_folder(folder: Path, *, wait_s: float = 0.0) -> tuple[int, bool]:
    """Lock a folder until `unlock_folder` gets the descriptor returned; else BlockingIOError.

    The second value is False where the file system has no locks (NFS, Lustre without `flock`).
    """
    give_up_s = time.monotonic() + wait_s
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, True
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                os.close(fd)
                raise
        except OSError:
            return fd, False
        time.sleep(_LOCK_POLL_S)


def unlock_folder(fd: int) -> None:
    """Release what `lock_folder` locked, also where a forked child has a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the folder's file system."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux `renameat2`); False where the file system cannot."""
    number = _renameat2(a, b)
    if number == 0:
        return True
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def _renameat2(a: Path, b: Path) -> int:
    """Swap two names; return 0 or the error's number."""
    call = _libc_function("renameat2")
    if call is None:
        return errno.ENOSYS
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return 0
    return ctypes.get_errno()


@cache
def _libc_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def remove_tree(path: Path) -> None:
    """Remove a folder or file as far as permissions allow; what stays of a folder has no reader.

    Of a link to a folder only the link goes.
    """
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            os.unlink(path)
        return
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))
        for name in folders:  # a link to a folder is listed here, too
            with suppress(OSError):
                full = os.path.join(folder, name)
                (os.unlink if os.path.islink(full) else os.rmdir)(full)
    with suppress(OSError):
        os.rmdir(path)

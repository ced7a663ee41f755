"""Copy byte ranges between files inside the kernel, in bounded memory.

`os.splice` through a pipe of 1 MiB was the fastest at ranges whose offsets lie anywhere (Linux
6.18, warm cache): on ext4 0.92 of `cp`'s CPU time, against 1.48 of `os.sendfile`, which passes
64 KiB at once; on tmpfs all are alike. It needs no memory of this process. Where the kernel cannot
do it between two files, a small buffer takes its place.

    with Pipe() as pipe:
        pipe.copy(source_fd, target_fd, offset=4096, size_bytes=1 << 20, name="model.safetensors")

What was moved may be given back to the file system at once: `free_range` makes a hole of it.
"""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from weight_convert.errors import CorruptFileError

_PIPE_BYTES = 1 << 20
_BUFFER_BYTES = 256 << 10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_NO_SPLICE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV})


class Pipe:
    """Moves bytes from file to file; a context. After an error it holds some: use another one."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # a user has a limit on all pipes together: smaller ones do
                fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._out)
        os.close(self._in)

    def copy(
        self, source_fd: int, target_fd: int, *, offset: int, size_bytes: int, name: str
    ) -> None:
        """Append a range of one open file to another at its file position.

        Args:
            source_fd: descriptor to read from; its position is not used.
            target_fd: descriptor to write to, at its position, which moves on.
            offset: first byte in the source.
            size_bytes: how many.
            name: what to call the source in an error.

        Raises:
            CorruptFileError: the source ends before the range does.
            OSError: reading or writing failed, for example on a full disk.
        """
        end = offset + size_bytes
        while offset < end:
            sent = self._send(source_fd, target_fd, offset, min(end - offset, _PIPE_BYTES))
            if sent == 0:
                raise CorruptFileError(
                    f"{name} ended at byte {offset} while it was read, expected {end - offset} "
                    f"more; was it changed during the conversion?"
                )
            offset += sent

    def _send(self, source_fd: int, target_fd: int, offset: int, size_bytes: int) -> int:
        """Copy at most `size_bytes`; return how many they were."""
        if not hasattr(os, "splice"):
            return copy_buffered(source_fd, target_fd, offset=offset, size_bytes=size_bytes)
        try:
            taken = os.splice(source_fd, self._in, size_bytes, offset_src=offset)
        except OSError as error:
            if error.errno not in _NO_SPLICE:
                raise
            return copy_buffered(source_fd, target_fd, offset=offset, size_bytes=size_bytes)
        rest = taken
        while rest:
            try:
                rest -= os.splice(self._out, target_fd, rest)
            except OSError as error:
                if error.errno not in _NO_SPLICE:
                    raise
                rest -= write_all(target_fd, os.read(self._out, rest))
        return taken


def copy_buffered(source_fd: int, target_fd: int, *, offset: int, size_bytes: int) -> int:
    """Copy at most `size_bytes` through a small buffer; return the bytes copied."""
    return write_all(target_fd, os.pread(source_fd, min(size_bytes, _BUFFER_BYTES), offset))


def write_all(fd: int, block: bytes | memoryview) -> int:
    """Write all of it, in as many system calls as it takes; return its bytes."""
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(block)


def same_bytes(fds: tuple[int, int], offsets: tuple[int, int], size_bytes: int) -> bool:
    """Whether two open files have the same bytes at two offsets; False where one is shorter."""
    for begin in range(0, size_bytes, _BUFFER_BYTES):
        count = min(_BUFFER_BYTES, size_bytes - begin)
        a, b = (os.pread(fd, count, at + begin) for fd, at in zip(fds, offsets, strict=True))
        if len(a) != count or a != b:
            return False
    return True


def free_range(fd: int, offset: int, size_bytes: int) -> None:
    """Give the blocks of a range back to the file system; it reads as zeros, the size stays.

    A range of no bytes asks whether that is possible, without doing it.

    Raises:
        OSError: the file system has no holes (EOPNOTSUPP), or the kernel is not Linux's (ENOSYS).
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, "this system cannot free parts of files")
    if size_bytes == 0:  # beyond the end: nothing is there to be freed
        offset, size_bytes = os.fstat(fd).st_size, 1
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size_bytes):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class OpenFiles:
    """Descriptors of many files, of which the last used ones stay open; a context."""

    def __init__(
        self, paths: Sequence[Path], *, max_open: int = 64, flags: int = os.O_RDONLY
    ) -> None:
        self._paths = paths
        self._max_open = max_open
        self._flags = flags
        self._fds: dict[int, int] = {}

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def fd(self, number: int) -> int:
        """Return a descriptor of file `number`, valid until `max_open` others were asked for."""
        fd = self._fds.pop(number, None)
        if fd is None:
            fd = os.open(self._paths[number], self._flags)
        self._fds[number] = fd  # a dict keeps insertion order: the first is the longest unused
        if len(self._fds) > self._max_open:
            os.close(self._fds.pop(next(iter(self._fds))))
        return fd

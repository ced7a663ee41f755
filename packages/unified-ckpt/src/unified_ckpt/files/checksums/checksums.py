"""CRC-32 of buffers, computed on other threads while the calling one writes or reads.

The CRC releases the interpreter lock, so it overlaps with system calls. Small buffers are
summed on the spot, where handing them over would cost more.

    with Checksums() as sums:
        pending = sums.start_chunks(buffer)
    pending.value()  # one CRC-32 per chunk
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar, cast

import torch

from unified_ckpt.files import BATCH_BYTES, PositionedFile, read_at
from unified_ckpt.files.checksums.crc import crc32
from unified_ckpt.geometry import Region
from unified_ckpt.geometry.tensors import byte_view

CHUNK_BYTES = 1024 * 1024  # the unit of checksums: what a read must cover to be checked

_T = TypeVar("_T")

_INLINE_BYTES = 64 * 1024
_COPY_RUN_BYTES = 512  # shorter runs are copied together before they are summed
_WORKERS = 2
_MAX_PENDING = 4  # bounds how many staged buffers are alive


def crc_of_file(fd: int | PositionedFile, region: Region) -> int | None:
    """Return the CRC-32 of a region of a file, None where the file ends too early.

    Holds at most `BATCH_BYTES` at once.
    """
    crc = 0
    buffer = memoryview(bytearray(min(region.run_bytes, BATCH_BYTES)))
    for start in region.run_starts():
        for begin in range(0, region.run_bytes, BATCH_BYTES):
            part = buffer[: min(BATCH_BYTES, region.run_bytes - begin)]
            if read_at(fd, [part], start + begin) != len(part):
                return None
            crc = crc32(part, crc)
    return crc


def crc_of_runs(buffer: memoryview, region: Region) -> int:
    """Return the CRC-32 of a strided region of a buffer, whose `start` counts in the buffer."""
    run, count = region.run_bytes, region.counts[-1]
    if run >= _COPY_RUN_BYTES:
        crc = 0
        for start in region.run_starts():
            crc = crc32(buffer[start : start + run], crc)
        return crc
    crc = 0
    memory = torch.frombuffer(buffer, dtype=torch.uint8)
    outer = Region(region.start, 0, region.counts[:-1], region.strides[:-1])
    for start in outer.run_starts():
        rows = memory.as_strided((count, run), (region.strides[-1], 1), start)
        crc = crc32(byte_view(rows.contiguous()), crc)
    return crc


def chunk_lengths(num_bytes: int) -> list[int]:
    """Lengths of the chunks of a contiguous piece, each with a checksum of its own."""
    whole, rest = divmod(num_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * bool(rest)


def crc_of_chunks(buffer: memoryview) -> list[int]:
    """Return the CRC-32 of every chunk of a contiguous piece."""
    return [crc32(buffer[i : i + CHUNK_BYTES]) for i in range(0, len(buffer), CHUNK_BYTES)]


class PendingSum(Generic[_T]):
    """A result that is known or being computed on another thread."""

    __slots__ = ("_future", "_known")

    def __init__(self, known: _T | None = None, future: "Future[_T] | None" = None) -> None:
        self._known = known
        self._future = future

    def value(self) -> _T:
        """Wait for the result."""
        if self._future is not None:
            return self._future.result()
        return cast(_T, self._known)


class Checksums(AbstractContextManager["Checksums"]):
    """Sums buffers on worker threads; a context manager that waits for the threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="unified-ckpt-crc")
        self._pending: deque[Future[Any]] = deque()

    def start_chunks(self, buffer: memoryview) -> PendingSum[list[int]]:
        """Begin to sum every chunk of a buffer, which must not change until `value` returned."""
        if buffer.nbytes <= _INLINE_BYTES:
            return PendingSum(crc_of_chunks(buffer))
        return self.call(crc_of_chunks, buffer)

    def call(self, work: Callable[..., _T], *arguments: Any) -> PendingSum[_T]:
        """Begin some work on another thread, after waiting if much is open already."""
        while len(self._pending) >= _MAX_PENDING:
            self._pending.popleft().result()
        future = self._pool.submit(work, *arguments)
        self._pending.append(future)
        return PendingSum(future=future)

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

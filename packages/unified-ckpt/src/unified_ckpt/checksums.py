"""CRC-32 of buffers, computed on other threads while the calling one writes or reads.

zlib's CRC releases the interpreter lock, so it overlaps with system calls. Small buffers are
summed on the spot, where handing them over would cost more.

    with Checksums() as sums:
        pending = sums.start(buffer)
    pending.value()
"""

import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

_INLINE_BYTES = 64 * 1024
_WORKERS = 2
_MAX_PENDING = 8  # bounds how many staged buffers are alive


class PendingSum:
    """A checksum that is known or being computed."""

    __slots__ = ("_future", "_known")

    def __init__(self, known: int = 0, future: "Future[int] | None" = None) -> None:
        self._known = known
        self._future = future

    def value(self) -> int:
        """Wait for the CRC-32 (an unsigned 32-bit number)."""
        return self._known if self._future is None else self._future.result()


class Checksums:
    """Sums buffers on worker threads; a context manager that waits for the threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="unified-ckpt-crc")
        self._pending: deque[Future[int]] = deque()

    def start(self, buffer: memoryview) -> PendingSum:
        """Begin to sum a buffer, which must not change until `value` has returned."""
        if buffer.nbytes <= _INLINE_BYTES:
            return PendingSum(zlib.crc32(buffer))
        while len(self._pending) >= _MAX_PENDING:
            self._pending.popleft().result()
        future = self._pool.submit(zlib.crc32, buffer)
        self._pending.append(future)
        return PendingSum(future=future)

    def __enter__(self) -> "Checksums":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)

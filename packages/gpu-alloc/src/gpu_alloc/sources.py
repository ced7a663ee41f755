"""Where chunks come from: invented addresses for simulation, real host memory, or (in the CuPy
adapter) a GPU.

Invariant: a source never hands out overlapping chunks, and every chunk starts at a multiple of
`alignment_bytes`.

>>> AddressSource(1 << 20, granularity_bytes=4096).acquire(1 << 21) is None
True
"""

import ctypes
import errno
import mmap
from abc import ABC, abstractmethod
from typing import final

from gpu_alloc.errors import AllocValueError, check_kind

_PAGE_BYTES = mmap.PAGESIZE
_FIRST_ADDRESS = 1 << 40


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


class ChunkSource(ABC):
    """Memory that an allocator takes in chunks.

    alignment_bytes: every chunk starts at a multiple of this.
    granularity_bytes: the source rounds a chunk up to this anyway, so allocators ask for multiples.
    An allocator calls `acquire` and `release` with its lock held: they must not call the allocator.
    """

    alignment_bytes: int
    granularity_bytes: int

    @abstractmethod
    def acquire(self, size_bytes: int) -> int | None:
        """Address of a new chunk of `size_bytes` (above 0), or None when there is no room."""

    @abstractmethod
    def release(self, ptr: int, size_bytes: int) -> None:
        """Take back a chunk that `acquire` returned."""


@final
class AddressSource(ChunkSource):
    """Invented addresses with nothing behind them, to run a policy without a device.

    capacity_bytes: what may be taken at a time; None is no limit. Like a GPU's driver, which maps
    physical pages anywhere, the source itself never fragments: only the sum of the chunks counts.
    granularity_bytes: 2 MiB by default, the physical page of an NVIDIA GPU.

    Raises AllocValueError for a negative capacity or a granularity that is not a power of two.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, granularity_bytes: int = 2 << 20
    ) -> None:
        _check_capacity(capacity_bytes)
        check_kind(granularity_bytes, int, "granularity_bytes must be a whole number")
        if granularity_bytes < 1 or granularity_bytes & (granularity_bytes - 1):
            raise AllocValueError(
                f"granularity_bytes={granularity_bytes} is not a power of two; use for example "
                "2097152"
            )
        self.capacity_bytes = capacity_bytes
        self.granularity_bytes = granularity_bytes
        self.alignment_bytes = max(granularity_bytes, 1 << 21)
        self.used_bytes = 0
        self._next = _FIRST_ADDRESS
        self._chunks: dict[int, int] = {}

    def acquire(self, size_bytes: int) -> int | None:
        """See `ChunkSource.acquire`. No address is given twice, so no stale pointer looks valid."""
        if self.capacity_bytes is not None and self.used_bytes + size_bytes > self.capacity_bytes:
            return None
        ptr = self._next
        self._next += round_up(size_bytes, self.alignment_bytes)
        self._chunks[ptr] = size_bytes
        self.used_bytes += size_bytes
        return ptr

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`. Raises AllocValueError for a chunk that is not out."""
        _check_is_out(self._chunks.get(ptr) == size_bytes, ptr, size_bytes)
        del self._chunks[ptr]
        self.used_bytes -= size_bytes


@final
class HostSource(ChunkSource):
    """Real host memory, filled with zeros; `view` reads and writes it.

    capacity_bytes: what may be taken at a time; None leaves it to the operating system.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        _check_capacity(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.granularity_bytes = _PAGE_BYTES
        self.alignment_bytes = _PAGE_BYTES
        self.used_bytes = 0
        self._maps: dict[int, mmap.mmap] = {}

    def acquire(self, size_bytes: int) -> int | None:
        """See `ChunkSource.acquire`."""
        if self.capacity_bytes is not None and self.used_bytes + size_bytes > self.capacity_bytes:
            return None
        try:
            pages = mmap.mmap(-1, size_bytes)
        except OverflowError:
            return None
        except OSError as error:
            if error.errno == errno.ENOMEM:
                return None
            raise
        ptr = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._maps[ptr] = pages
        self.used_bytes += size_bytes
        return ptr

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`. The pages live on until the last view of them is gone."""
        _check_is_out(len(self._maps.get(ptr, ())) == size_bytes, ptr, size_bytes)
        del self._maps[ptr]
        self.used_bytes -= size_bytes

    def view(self, ptr: int, size_bytes: int) -> memoryview:
        """Writable bytes [ptr, ptr + size_bytes), without a copy.

        Raises AllocValueError when the range is not inside one chunk.
        """
        for start, pages in list(self._maps.items()):
            if start <= ptr and size_bytes >= 0 and ptr + size_bytes <= start + len(pages):
                return memoryview(pages)[ptr - start : ptr - start + size_bytes]
        raise AllocValueError(
            f"[{ptr:#x}, {ptr + size_bytes:#x}) is not inside one chunk of this source; pass a "
            "block's ptr and size"
        )


def _check_capacity(capacity_bytes: int | None) -> None:
    check_kind(capacity_bytes, (int, type(None)), "capacity_bytes must be a whole number or None")
    if capacity_bytes is not None and capacity_bytes < 0:
        raise AllocValueError(
            f"capacity_bytes={capacity_bytes} is negative; give bytes, or None for no limit"
        )


def _check_is_out(is_out: bool, ptr: int, size_bytes: int) -> None:
    if not is_out:
        raise AllocValueError(
            f"no chunk of {size_bytes} bytes at {ptr:#x} is out; release each chunk once, whole"
        )

"""Real host memory as a source, so that a program's bytes can be looked at without a device.

Invariant: a chunk is one anonymous mapping of whole pages, filled with zeros.

>>> HostSource(1 << 20).acquire(1 << 21) is None
True
"""

import ctypes
import errno
import mmap
from typing import final

from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.sources.chunk_source import ChunkSource, check_capacity, check_is_out

_PAGE_BYTES = mmap.PAGESIZE


@final
class HostSource(ChunkSource):
    """Real host memory, filled with zeros; `view` reads and writes it.

    capacity_bytes: what may be taken at a time; None leaves it to the operating system.
    granularity_bytes: chunks are multiples of this, of whole pages.

    Raises AllocValueError for a negative capacity or a granularity that is not of whole pages.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, granularity_bytes: int = _PAGE_BYTES
    ) -> None:
        check_capacity(capacity_bytes)
        check_kind(granularity_bytes, int, "granularity_bytes must be a whole number")
        if granularity_bytes < 1 or granularity_bytes % _PAGE_BYTES:
            raise AllocValueError(
                f"granularity_bytes={granularity_bytes} is not of whole pages; use a multiple of "
                f"{_PAGE_BYTES}"
            )
        self.capacity_bytes = capacity_bytes
        self.granularity_bytes = granularity_bytes
        self.alignment_bytes = _PAGE_BYTES
        self.used_bytes = 0
        self._maps: dict[int, mmap.mmap] = {}

    def acquire(self, size_bytes: int) -> int | None:
        """See `ChunkSource.acquire`."""
        if self.capacity_bytes is not None and self.used_bytes + size_bytes > self.capacity_bytes:
            return None
        try:
            # Not shared with processes that are forked, whose allocators hand it out again.
            pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
        check_is_out(len(self._maps.get(ptr, ())) == size_bytes, ptr, size_bytes)
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

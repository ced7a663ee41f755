"""Address space that is reserved once, with memory mapped into it a page at a time.

An allocator on such a source grows and shrinks in place: a free place keeps its addresses and may
have no memory behind it; where memory is short, the pages of free places are mapped elsewhere.

Invariant: a page is mapped or not; only mapped pages count against the capacity.

>>> source = PagedAddressSource(4 << 20)
>>> start = source.acquire(1 << 30)
>>> source.map(start, 4 << 20), source.map(start + (8 << 20), 2 << 20)
(True, False)
"""

import ctypes
import mmap
from abc import abstractmethod
from typing import final

from gpu_alloc.errors import AllocValueError
from gpu_alloc.sources.address import AddressSource
from gpu_alloc.sources.chunk_source import ChunkSource, check_capacity, check_is_out, round_up

_PAGE = 2 << 20  # the physical page of an NVIDIA GPU


class PagedSource(ChunkSource):
    """A source whose `acquire` reserves addresses without memory, in whole pages.

    `map` and `unmap` are called with the allocator's lock held and ranges of whole pages inside a
    chunk. `release` is called once nothing in the chunk is mapped. range_bytes: what an allocator
    reserves at a time; more than a device has, so that a place is always found.
    """

    alignment_bytes = _PAGE
    granularity_bytes = _PAGE
    range_bytes = 256 << 30

    @abstractmethod
    def map(self, ptr: int, size_bytes: int) -> bool:
        """Put memory behind pages that have none; False, and nothing done, without room."""

    @abstractmethod
    def unmap(self, ptr: int, size_bytes: int) -> None:
        """Take the memory of mapped pages away, once the device has done all work on it."""


class _Counted(PagedSource):
    """Counts mapped bytes against a capacity."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        check_capacity(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0

    def map(self, ptr: int, size_bytes: int) -> bool:
        """See `PagedSource.map`."""
        if self.capacity_bytes is not None and self.used_bytes + size_bytes > self.capacity_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def unmap(self, ptr: int, size_bytes: int) -> None:
        """See `PagedSource.unmap`."""
        self.used_bytes -= size_bytes


@final
class PagedAddressSource(_Counted):
    """Invented addresses in pages, to run a policy without a device.

    capacity_bytes: what may be mapped at a time; None is no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._addresses = AddressSource()

    def acquire(self, size_bytes: int) -> int | None:
        """See `PagedSource`. No address is given twice."""
        return self._addresses.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`."""
        self._addresses.release(ptr, size_bytes)


@final
class PagedHostSource(_Counted):
    """Real host memory in pages. Mapped pages begin as zeros; others cannot be touched.

    capacity_bytes: what may be mapped at a time; None leaves it to the operating system.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
        self._libc.munmap.argtypes = (pointer, size)
        self._reserved: dict[int, tuple[int, int]] = {}  # chunk -> the range that holds it

    def acquire(self, size_bytes: int) -> int | None:
        """See `PagedSource`."""
        whole = size_bytes + _PAGE  # of which the middle starts at a page of ours
        start = self._mmap(0, whole, _NO_ACCESS, 0)
        if start is None:
            return None
        ptr = round_up(start, _PAGE)
        self._reserved[ptr] = start, whole
        return ptr

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`."""
        start, whole = self._reserved.get(ptr, (0, 0))
        check_is_out(whole == size_bytes + _PAGE, ptr, size_bytes)
        del self._reserved[ptr]
        self._libc.munmap(start, whole)

    def map(self, ptr: int, size_bytes: int) -> bool:
        """See `PagedSource.map`."""
        if not super().map(ptr, size_bytes):
            return False
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if self._mmap(ptr, size_bytes, access, _FIXED) is not None:
            return True
        super().unmap(ptr, size_bytes)
        return False

    def unmap(self, ptr: int, size_bytes: int) -> None:
        """See `PagedSource.unmap`."""
        self._mmap(ptr, size_bytes, _NO_ACCESS, _FIXED)
        super().unmap(ptr, size_bytes)

    def view(self, ptr: int, size_bytes: int) -> memoryview:
        """Writable bytes [ptr, ptr + size_bytes), without a copy.

        Raises AllocValueError when the range is not inside one chunk. Bytes of a block that lives
        are mapped; others end the process when they are touched.
        """
        for chunk, (_, whole) in list(self._reserved.items()):
            if chunk <= ptr and size_bytes >= 0 and ptr + size_bytes <= chunk + whole - _PAGE:
                return memoryview((ctypes.c_char * size_bytes).from_address(ptr)).cast("B")
        raise AllocValueError(
            f"[{ptr:#x}, {ptr + size_bytes:#x}) is not inside one chunk of this source; pass a "
            "block's ptr and size"
        )

    def _mmap(self, ptr: int, size_bytes: int, access: int, flags: int) -> int | None:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        found = self._libc.mmap(ptr, size_bytes, access, flags, -1, 0)
        return None if found in (None, _FAILED) else int(found)


_NO_ACCESS = 0  # PROT_NONE
_FIXED = 0x10  # MAP_FIXED
_NO_RESERVE = 0x4000  # MAP_NORESERVE: what is not touched takes nothing
_FAILED = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1

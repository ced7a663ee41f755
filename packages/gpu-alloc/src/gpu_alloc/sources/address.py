"""Invented addresses, on which a policy runs without a device.

Invariant: no address is given twice, so that a stale pointer never looks valid.

>>> AddressSource(1 << 20, granularity_bytes=4096).acquire(1 << 21) is None
True
"""

from typing import final

from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.sources.chunk_source import ChunkSource, check_capacity, check_is_out, round_up

_FIRST_ADDRESS = 1 << 40


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
        check_capacity(capacity_bytes)
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
        check_is_out(self._chunks.get(ptr) == size_bytes, ptr, size_bytes)
        del self._chunks[ptr]
        self.used_bytes -= size_bytes

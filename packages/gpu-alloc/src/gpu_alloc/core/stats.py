"""What an allocator holds, in torch's words, as plain numbers.

requested: bytes that callers asked for. allocated: the same after padding to the alignment.
reserved: bytes taken from the source. Invariant: requested <= allocated <= reserved, and each peak
is at least its present value.

>>> Stats(small=PoolStats(), large=PoolStats()).fragmentation
0.0
"""

from dataclasses import dataclass
from typing import final

from gpu_alloc.errors import check_kind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counters of one pool; every `*_bytes` is a number of bytes."""

    allocated_bytes: int = 0
    allocated_peak_bytes: int = 0
    requested_bytes: int = 0
    requested_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    largest_free_bytes: int = 0
    num_live_blocks: int = 0
    num_free_blocks: int = 0
    num_chunks: int = 0

    @property
    def free_bytes(self) -> int:
        """Reserved and not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest free block; 0 when nothing is free."""
        return 1.0 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Both pools, and the peaks of their sums, which may be less than the sums of their peaks."""

    small: PoolStats
    large: PoolStats
    allocated_peak_bytes: int = 0
    requested_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    num_source_calls: int = 0

    def __post_init__(self) -> None:
        for pool in (self.small, self.large):
            check_kind(pool, PoolStats, "small and large must be PoolStats")

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use, padded."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def requested_bytes(self) -> int:
        """Bytes in use, as requested."""
        return self.small.requested_bytes + self.large.requested_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the source."""
        return self.small.reserved_bytes + self.large.reserved_bytes

    @property
    def free_bytes(self) -> int:
        """Reserved and not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes of both pools outside the largest free block."""
        largest = max(self.small.largest_free_bytes, self.large.largest_free_bytes)
        return 1.0 - largest / self.free_bytes if self.free_bytes else 0.0

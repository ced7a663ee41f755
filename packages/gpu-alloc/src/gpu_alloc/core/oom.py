"""The error of a request that found no memory, with its report: the numbers, and what to change.

Invariant: the remedy follows from the numbers in the same report, so a reader can check it. It
names no setting that was not tried: which settings would have fitted is found by replay (`explain`
in the room trace).

>>> format_bytes(1536)
'1.50 KiB'
"""

from dataclasses import dataclass
from typing import final

from gpu_alloc.core.stats import PoolStats, Stats
from gpu_alloc.errors import AllocError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(size_bytes: int) -> str:
    """Readable binary units with three significant digits or more: `512 B`, `1.50 MiB`."""
    power = min(max(abs(size_bytes).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    if power == 0:
        return f"{size_bytes} B"
    return f"{size_bytes / (1 << 10 * power):.2f} {_UNITS[power]}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """Why one request failed.

    requested_bytes, padded_bytes: the request before and after padding to the alignment.
    limit_bytes: the hard limit in force; 0 is none.
    usable_bytes: free bytes that the request's stream may use in both pools; largest_usable_bytes:
    the largest block. waiting_bytes: of the bytes in use, those that are freed and wait for the
    event of another stream (only while a graph is captured; otherwise they were waited for).
    """

    requested_bytes: int
    padded_bytes: int
    pool: str
    stream: int
    stats: Stats
    limit_bytes: int
    usable_bytes: int
    largest_usable_bytes: int
    waiting_bytes: int = 0

    def remedy(self) -> str:
        """One sentence: the cause that the numbers show, and what to change."""
        need = format_bytes(self.padded_bytes)
        held = self.stats.free_bytes
        if self.limit_bytes and self.padded_bytes > self.limit_bytes:
            return (
                f"the request alone exceeds the limit of {format_bytes(self.limit_bytes)}; raise "
                "memory_limit_in_mb"
            )
        if self.waiting_bytes:
            return (
                f"{format_bytes(self.waiting_bytes)} are freed and wait for other streams, which "
                "cannot be asked while a graph is captured; end the capture, or capture with "
                "memory that was allocated before"
            )
        if self.usable_bytes >= self.padded_bytes:
            return (
                f"memory is fragmented: {format_bytes(self.usable_bytes)} are free but the largest "
                f"place is {format_bytes(self.largest_usable_bytes)}; record the program "
                "(`gpu-alloc record`), and `gpu-alloc explain` replays which settings would fit"
            )
        if held >= self.padded_bytes:
            return (
                f"{format_bytes(held - self.usable_bytes)} are free but belong to other streams; "
                "allocate on fewer streams, or free a stream's memory whole so that its chunks can "
                "be given back"
            )
        if self.limit_bytes and self.stats.reserved_bytes + self.padded_bytes > self.limit_bytes:
            return (
                f"{need} more than the {format_bytes(self.stats.reserved_bytes)} reserved exceeds "
                "the limit of "
                f"{format_bytes(self.limit_bytes)}; raise memory_limit_in_mb or keep less alive "
                "(smaller microbatch, "
                "activation recompute)"
            )
        return (
            f"the source has no room for {need} more; keep less alive (smaller microbatch, "
            "activation recompute, more "
            "ranks) or use a larger device"
        )

    def message(self) -> str:
        """The whole report as text of a few lines."""
        stats = self.stats
        limit = format_bytes(self.limit_bytes) if self.limit_bytes else "none"
        return "\n".join(
            (
                f"out of memory: {format_bytes(self.requested_bytes)} ({self.padded_bytes} bytes "
                "after padding) for the "
                f"{self.pool} pool on stream {self.stream}",
                f"  in use {format_bytes(stats.allocated_bytes)}, reserved "
                f"{format_bytes(stats.reserved_bytes)} (peak "
                f"{format_bytes(stats.reserved_peak_bytes)}), limit {limit}, fragmentation "
                f"{stats.fragmentation:.0%}",
                _pool_line("small", stats.small),
                _pool_line("large", stats.large),
                f"  remedy: {self.remedy()}",
            )
        )


class OutOfMemoryError(AllocError, MemoryError):
    """No placement was found; `report` holds the numbers and the message a remedy."""

    def __init__(self, report: OomReport) -> None:
        # Not super(): the CuPy adapter's subclass also has CuPy's error as a base, whose own
        # constructor takes other arguments.
        MemoryError.__init__(self, report.message())
        self.report = report

    def __reduce__(self) -> tuple[type["OutOfMemoryError"], tuple[OomReport]]:
        return OutOfMemoryError, (self.report,)


def _pool_line(name: str, pool: PoolStats) -> str:
    return (
        f"  {name} pool: {format_bytes(pool.allocated_bytes)} in {pool.num_live_blocks} blocks, "
        f"{format_bytes(pool.free_bytes)} free in {pool.num_free_blocks} (largest "
        f"{format_bytes(pool.largest_free_bytes)}), {pool.num_chunks} chunks"
    )

"""torch's caching allocator with the methods of ours, so that CuPy can draw from it.

What torch has cached, CuPy then uses, and the other way round; statistics and snapshots are
torch's.

Invariant: a block goes back to the stream of torch's that it was taken for.

    gpu_alloc.cupy.use(share="torch")
"""

from typing import final

from gpu_alloc.core import Allocation, OomReport, OutOfMemoryError, PoolStats, Stats
from gpu_alloc.errors import AllocValueError
from gpu_alloc.torch._torch_private import torch

UNIT_BYTES = 512  # torch rounds requests up to this
_SMALL_BYTES = 1 << 20  # and serves up to this from its small pool


@final
class TorchCache:
    """Blocks of torch's caching allocator on one device. Settings are torch's own."""

    def __init__(self, device: int) -> None:
        torch.cuda.init()
        self._device = device
        self._limit_bytes = 0

    def malloc(self, nbytes: int, stream: int = 0) -> Allocation:
        """See `TwoPoolAllocator.malloc`; stream: a handle of CUDA's. Raises AllocValueError for a
        per-thread default stream, which torch cannot tell from that of another thread.
        """
        if stream < 0:
            raise AllocValueError(
                "torch's allocator does not know per-thread default streams; use a stream of its "
                "own for the thread, or share='arena'"
            )
        if nbytes == 0:
            return Allocation(0, 0)
        padded = -(-nbytes // UNIT_BYTES) * UNIT_BYTES
        try:
            ptr = torch.cuda.caching_allocator_alloc(nbytes, self._device, stream)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(self._report(nbytes, padded, stream)) from None
        return Allocation(int(ptr), padded)

    def free(self, ptr: int) -> None:
        """See `TwoPoolAllocator.free`."""
        if ptr:
            torch.cuda.caching_allocator_delete(ptr)

    def record_stream(self, ptr: int, stream: int) -> None:
        """Raises AllocValueError: torch records streams of tensors only."""
        raise AllocValueError(
            "torch's allocator records streams of tensors only; have the streams wait for each "
            "other, or share the arena instead of torch's allocator"
        )

    def release_idle(self, *, stream: int | None = None) -> int:
        """Give torch's idle segments back, of all streams; returns the bytes given back."""
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)

    def stats(self) -> Stats:
        """torch's counters under our names."""
        counters = torch.cuda.memory_stats(self._device)
        return Stats(
            small=self._pool("small", counters),
            large=self._pool("large", counters),
            allocated_peak_bytes=counters["allocated_bytes.all.peak"],
            requested_peak_bytes=counters["requested_bytes.all.peak"],
            reserved_peak_bytes=counters["reserved_bytes.all.peak"],
            num_source_calls=counters["num_device_alloc"] + counters["num_device_free"],
        )

    @property
    def limit_bytes(self) -> int:
        """What `set_limit` was given; 0 is none."""
        return self._limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """`torch.cuda.set_per_process_memory_fraction`, in bytes: it holds for torch too."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        fraction = min(limit_bytes / total, 1.0) if limit_bytes else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)
        self._limit_bytes = limit_bytes

    def _pool(self, name: str, counters: dict[str, int]) -> PoolStats:
        def of(what: str, when: str = "current") -> int:
            return counters[f"{what}.{name}_pool.{when}"]

        return PoolStats(
            allocated_bytes=of("allocated_bytes"),
            allocated_peak_bytes=of("allocated_bytes", "peak"),
            requested_bytes=of("requested_bytes"),
            requested_peak_bytes=of("requested_bytes", "peak"),
            reserved_bytes=of("reserved_bytes"),
            reserved_peak_bytes=of("reserved_bytes", "peak"),
            largest_free_bytes=max(self._free_blocks(name), default=0),
            num_live_blocks=of("allocation"),
            num_free_blocks=len(self._free_blocks(name)),
            num_chunks=of("segment"),
        )

    def _free_blocks(self, pool: str) -> list[int]:
        return [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["segment_type"] == pool and segment["device"] == self._device
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]

    def _report(self, requested: int, padded: int, stream: int) -> OomReport:
        stats = self.stats()
        return OomReport(
            requested_bytes=requested,
            padded_bytes=padded,
            pool="small" if padded <= _SMALL_BYTES else "large",
            stream=stream,
            stats=stats,
            limit_bytes=self._limit_bytes,
            usable_bytes=stats.free_bytes,
            largest_usable_bytes=max(
                stats.small.largest_free_bytes, stats.large.largest_free_bytes
            ),
        )

"""Where a `CupyPool` takes its blocks from: an allocator of its own, or one that torch uses too.

Invariant: a pool that shares never closes what it shares.

>>> check_share("arena")
"""

from importlib import import_module
from typing import Literal, Protocol, cast

from gpu_alloc.core import AllocatorConfig, Stats, TwoPoolAllocator
from gpu_alloc.errors import AllocValueError
from gpu_alloc.native import NativeAllocator, is_compiled
from gpu_alloc.sources import ChunkSource, StreamEvents

Share = Literal["torch", "arena"] | None


class PoolAllocator(Protocol):
    """What a pool asks of an allocator; see `TwoPoolAllocator`."""

    def malloc(self, nbytes: int, stream: int = 0) -> tuple[int, int]:
        """See `TwoPoolAllocator.malloc`."""

    def free(self, ptr: int) -> None:
        """See `TwoPoolAllocator.free`."""

    def record_stream(self, ptr: int, stream: int) -> None:
        """See `TwoPoolAllocator.record_stream`."""

    def release_idle(self, *, stream: int | None = None) -> int:
        """See `TwoPoolAllocator.release_idle`."""

    def stats(self) -> Stats:
        """See `TwoPoolAllocator.stats`."""

    @property
    def limit_bytes(self) -> int:
        """See `TwoPoolAllocator.limit_bytes`."""

    def set_limit(self, limit_bytes: int) -> None:
        """See `TwoPoolAllocator.set_limit`."""


def check_share(share: object) -> None:
    """Raise AllocValueError unless this names something to share."""
    if share not in ("torch", "arena", None):
        raise AllocValueError(
            f"share={share!r}; give 'torch' for torch's caching allocator, 'arena' for the memory "
            "that gpu_alloc.torch serves torch from, or None for a pool of CuPy's own"
        )


def own_allocator(
    source: ChunkSource, config: AllocatorConfig, events: StreamEvents | None
) -> TwoPoolAllocator | NativeAllocator:
    """An allocator of the pool's own: the compiled core where there is one, which decides as the
    Python core does.
    """
    if not is_compiled():
        return TwoPoolAllocator(source, config, events=events)
    return NativeAllocator(source, config, events=events)


def shared_allocator(share: Share, config: AllocatorConfig, device_id: int) -> PoolAllocator:
    """The allocator of a device that torch uses too. Raises as `gpu_alloc.torch.open_arena`."""
    if share == "torch":
        return cast("PoolAllocator", import_module("gpu_alloc.torch").TorchCache(device_id))
    arena = import_module("gpu_alloc.torch").open_arena(config)
    return cast("PoolAllocator", arena.allocator(device_id))

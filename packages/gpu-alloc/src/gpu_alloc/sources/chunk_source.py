"""What an allocator asks of memory: chunks of a size, taken and given back.

Invariant: a source never hands out overlapping chunks, and every chunk starts at a multiple of
`alignment_bytes`.

>>> round_up(1000, 512)
1024
"""

from abc import ABC, abstractmethod

from gpu_alloc.errors import AllocValueError, check_kind


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


def check_capacity(capacity_bytes: int | None) -> None:
    """Raise AllocTypeError or AllocValueError unless this is a number of bytes or None."""
    check_kind(capacity_bytes, (int, type(None)), "capacity_bytes must be a whole number or None")
    if capacity_bytes is not None and capacity_bytes < 0:
        raise AllocValueError(
            f"capacity_bytes={capacity_bytes} is negative; give bytes, or None for no limit"
        )


def check_is_out(is_out: bool, ptr: int, size_bytes: int) -> None:
    """Raise AllocValueError for a chunk that is released and was not out."""
    if not is_out:
        raise AllocValueError(
            f"no chunk of {size_bytes} bytes at {ptr:#x} is out; release each chunk once, whole"
        )


def check_alignment(alignment_size: int, source: ChunkSource) -> None:
    """Raise AllocValueError when the source aligns chunks to less."""
    if alignment_size > source.alignment_bytes:
        raise AllocValueError(
            f"alignment_size={alignment_size} but the source aligns chunks to "
            f"{source.alignment_bytes} bytes only; set alignment_size to at most "
            f"{source.alignment_bytes}"
        )

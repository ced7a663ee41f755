"""Which bytes of a snapshot are copied in which microbatch: pure data, balanced by bytes.

plan = plan_offload([100, 0, 300], num_chunks=2, unit_bytes=1)
plan.chunks == ((ByteSlice(0, 0, 100), ByteSlice(2, 0, 100)), (ByteSlice(2, 100, 300),))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import round_up

DEFAULT_UNIT_BYTES = 4096


class ByteSlice(NamedTuple):
    """Bytes `begin` to `end` of an item, by its number."""

    item: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """The slices of every chunk; together each byte of each item once, in order."""

    chunks: tuple[tuple[ByteSlice, ...], ...]

    def chunk_bytes(self) -> list[int]:
        """Return the number of bytes of every chunk."""
        return [sum(piece.end - piece.begin for piece in chunk) for chunk in self.chunks]


def plan_offload(
    sizes: Sequence[int],
    *,
    num_chunks: int,
    divisible: Sequence[bool] | None = None,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
) -> OffloadPlan:
    """Cut items into `num_chunks` chunks of about equal bytes; linear in items and chunks.

    No chunk of divisible items exceeds its share by more than `unit_bytes`.

    Args:
        sizes: bytes of each item.
        num_chunks: chunks to make, one a microbatch; some may be empty.
        divisible: whether an item may be cut, at multiples of `unit_bytes`; None for all. One that
            may not goes whole into the chunk in which its middle lies.
        unit_bytes: items are cut at multiples of it.
    """
    if num_chunks < 1 or unit_bytes < 1 or any(size < 0 for size in sizes):
        raise CheckpointValueError(
            f"num_chunks={num_chunks} and unit_bytes={unit_bytes} must be at least 1, and sizes "
            "must not be negative"
        )
    total = sum(sizes)
    ends = [total * (number + 1) // num_chunks for number in range(num_chunks)]
    chunks: list[list[ByteSlice]] = [[] for _ in range(num_chunks)]
    number, at = 0, 0  # at: bytes of all items before this one
    for index, size in enumerate(sizes):
        begin = 0
        if divisible is not None and not divisible[index]:
            while at + size // 2 >= ends[number] and number < num_chunks - 1:
                number += 1
        else:
            while at + size > ends[number]:
                cut = min(round_up(max(0, ends[number] - at), unit_bytes), size)
                if cut > begin:
                    chunks[number].append(ByteSlice(index, begin, cut))
                    begin = cut
                if cut == size:
                    break
                number += 1
        if size > begin:
            chunks[number].append(ByteSlice(index, begin, size))
        at += size
    return OffloadPlan(tuple(tuple(chunk) for chunk in chunks))

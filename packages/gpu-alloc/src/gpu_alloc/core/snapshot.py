"""A picture of an allocator's memory as plain data, and a checker that knows only that data.

The checker shares no code with the policy: it recomputes cover, overlap, merging and the free lists
from the picture, so that a policy that keeps good statistics but places badly is caught.

>>> check_snapshot(Snapshot(alignment_size=512, chunks=(), free_entries=()))
[]
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import final

from gpu_alloc.core.pool import Pool
from gpu_alloc.errors import check_kind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """One block: address, size and the bytes requested (0 when free); `stream` is None until a
    stream uses it.
    """

    stream: int | None
    ptr: int
    size: int
    requested_bytes: int
    is_free: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """One chunk with its blocks by rising address."""

    pool: str
    ptr: int
    size: int
    pre_allocated: bool
    blocks: tuple[BlockView, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All chunks, and what the free lists hold as (pool, stream, address, size).

    A stream's entries are the places that it may use and no other stream; those of None are free
    for all, and may begin a stream's place as well.
    """

    alignment_size: int
    chunks: tuple[ChunkView, ...]
    free_entries: tuple[tuple[str, int | None, int, int], ...]

    def __post_init__(self) -> None:
        check_kind(self.chunks, tuple, "chunks must be a tuple of ChunkViews")
        check_kind(self.free_entries, tuple, "free_entries must be a tuple")

    @classmethod
    def from_numbers(cls, alignment_size: int, numbers: Sequence[int]) -> "Snapshot":
        """What the compiled core writes: the number of chunks; of each its pool, address, size,
        whether it is pre-allocated and how many blocks follow, of which each has stream, address,
        size, requested bytes and whether it is free; then the free lists' entries.
        """
        rest = iter(numbers)
        chunks = []
        for _ in range(next(rest)):
            pool, ptr, size, pre_allocated, num_blocks = islice(rest, 5)
            blocks = tuple(
                BlockView(
                    stream=_stream(stream),
                    ptr=at,
                    size=of_size,
                    requested_bytes=requested,
                    is_free=bool(is_free),
                )
                for stream, at, of_size, requested, is_free in batches(rest, 5, num_blocks)
            )
            chunks.append(
                ChunkView(
                    pool=_POOLS[pool],
                    ptr=ptr,
                    size=size,
                    pre_allocated=bool(pre_allocated),
                    blocks=blocks,
                )
            )
        entries = tuple((_POOLS[p], _stream(s), at, size) for p, s, at, size in batches(rest, 4))
        return cls(alignment_size=alignment_size, chunks=tuple(chunks), free_entries=entries)


_PLANNED = "planned"  # the range of the plan that is followed
_POOLS = ("small", "large", _PLANNED)
_NO_STREAM = -(2**63)


def batches(
    numbers: Iterator[int], size: int, count: int | None = None
) -> Iterator[tuple[int, ...]]:
    """The next `count` tuples of `size` numbers; None: all that are left."""
    for _ in range(count) if count is not None else repeat(None):
        batch = tuple(islice(numbers, size))
        if not batch:
            return
        yield batch


def _stream(number: int) -> int | None:
    return None if number == _NO_STREAM else number


def take_snapshot(pools: Iterable[Pool], alignment_size: int) -> Snapshot:
    """Copy the state of `pools`; the caller holds their lock."""
    chunks: list[ChunkView] = []
    entries: list[tuple[str, int | None, int, int]] = []
    for pool in pools:
        entries.extend((pool.name, *entry) for entry in pool.free_entries())
        planned = None if pool.planned is None else pool.planned.chunk
        for block in () if pool.planned is None else pool.planned.free_blocks():
            entries.append((_PLANNED, block.stream, block.ptr, block.size))
        for chunk in pool.chunks.values():
            views = tuple(
                BlockView(
                    stream=block.stream,
                    ptr=block.ptr,
                    size=block.size,
                    requested_bytes=block.requested,
                    is_free=block.is_free,
                )
                for block in chunk.blocks()
            )
            chunks.append(
                ChunkView(
                    pool=_PLANNED if chunk is planned else pool.name,
                    ptr=chunk.ptr,
                    size=chunk.size,
                    pre_allocated=chunk.pre_allocated,
                    blocks=views,
                )
            )
    return Snapshot(
        alignment_size=alignment_size, chunks=tuple(chunks), free_entries=tuple(entries)
    )


def check_snapshot(snapshot: Snapshot) -> list[str]:
    """Every broken invariant as one sentence; empty when all hold."""
    check_kind(snapshot, Snapshot, "snapshot must be a Snapshot")
    problems: list[str] = []
    ordered = sorted(snapshot.chunks, key=lambda chunk: chunk.ptr)
    for before, after in pairwise(ordered):
        if before.ptr + before.size > after.ptr:
            problems.append(f"chunks at {before.ptr:#x} and {after.ptr:#x} overlap")
    for chunk in ordered:
        problems.extend(_check_cover(chunk))
        problems.extend(_check_blocks(chunk, snapshot.alignment_size))
    held = sorted(snapshot.free_entries, key=repr)
    expected = sorted((place for chunk in ordered for place in _places(chunk)), key=repr)
    if held != expected:
        problems.append(f"free lists hold {held}, but the free blocks are {expected}")
    return problems


def _places(chunk: ChunkView) -> Iterator[tuple[str, int | None, int, int]]:
    """What the free lists should hold of a chunk: each free block, with unused memory before it."""
    unused_bytes = 0
    for block in chunk.blocks:
        if block.is_free:
            before = 0 if block.stream is None else unused_bytes
            yield chunk.pool, block.stream, block.ptr - before, block.size + before
        unused_bytes = block.size if block.stream is None else 0


def _check_cover(chunk: ChunkView) -> Iterator[str]:
    position = chunk.ptr
    for block in chunk.blocks:
        if block.ptr != position:
            yield f"block at {block.ptr:#x} should start at {position:#x} (gap or overlap)"
        position = block.ptr + block.size
    if position != chunk.ptr + chunk.size:
        end = chunk.ptr + chunk.size
        yield f"chunk at {chunk.ptr:#x} ends at {end:#x}, its blocks at {position:#x}"


def _check_blocks(chunk: ChunkView, alignment_size: int) -> Iterator[str]:
    for block in chunk.blocks:
        if block.size <= 0 or block.ptr % alignment_size or block.size % alignment_size:
            yield f"{block} is not aligned to {alignment_size}"
        if block.stream is None and not (block.is_free and block.ptr == chunk.ptr):
            yield f"{block} belongs to no stream but is not the free start of its chunk"
        if block.is_free != (block.requested_bytes == 0) or block.requested_bytes > block.size:
            yield f"{block} is counted wrongly"
    for before, after in pairwise(chunk.blocks):
        if before.is_free and after.is_free and before.stream == after.stream:
            yield f"free blocks at {before.ptr:#x} and {after.ptr:#x} are not merged"

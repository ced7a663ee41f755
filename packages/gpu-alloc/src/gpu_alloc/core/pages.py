"""Which pages of a chunk have memory behind them, where a source maps pages (`PagedSource`).

Invariant: every page that a block in use touches is mapped; a page that is unmapped had only free
blocks on it.
"""

from collections.abc import Iterator
from typing import final

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.sources import PagedSource

_BYTES = PagedSource.granularity_bytes


@final
class Pages:
    """The page tables of one allocator's chunks, by the chunks' numbers."""

    def __init__(self, source: PagedSource) -> None:
        self._source = source
        self._tables: dict[int, bytearray] = {}
        self.num_calls = 0

    def add(self, chunk: Chunk) -> None:
        """A chunk whose pages are not mapped."""
        self._tables[chunk.number] = bytearray(chunk.size // _BYTES)

    def drop(self, chunk: Chunk) -> None:
        """A chunk that is given back, without a mapped page."""
        del self._tables[chunk.number]

    def num_missing(self, block: Block) -> int:
        """How many pages under a block are not mapped."""
        first, end = _touched(block)
        return self._tables[block.chunk.number].count(0, first, end)

    def map(self, block: Block) -> bool:
        """Map what is missing under a block, or nothing of it."""
        table = self._tables[block.chunk.number]
        mapped: list[tuple[int, int]] = []
        is_whole = False
        try:
            for first, end in _runs(table, 0, *_touched(block)):
                self.num_calls += 1
                ptr = block.chunk.ptr + first * _BYTES
                if not self._source.map(ptr, (end - first) * _BYTES):
                    return False
                table[first:end] = b"\1" * (end - first)
                mapped.append((first, end))
            is_whole = True
        finally:  # also when the source raises
            if not is_whole:
                for begin, stop in mapped:
                    self._unmap(block.chunk, begin, stop)
        return True

    def unmap_free(self, chunk: Chunk, stream: int | None = None) -> int:
        """Unmap the pages that only free blocks touch, with `stream` those of blocks that no other
        stream has used; returns their bytes.
        """
        found = 0
        for start, stop in _free_runs(chunk, stream):
            first = -(-(start - chunk.ptr) // _BYTES)
            last = (stop - chunk.ptr) // _BYTES
            for begin, end in list(_runs(self._tables[chunk.number], 1, first, last)):
                self._unmap(chunk, begin, end)
                found += (end - begin) * _BYTES
        return found

    def _unmap(self, chunk: Chunk, first: int, end: int) -> None:
        self.num_calls += 1
        self._source.unmap(chunk.ptr + first * _BYTES, (end - first) * _BYTES)
        self._tables[chunk.number][first:end] = bytes(end - first)


def _touched(block: Block) -> tuple[int, int]:
    """The pages of its chunk that a block touches: the first, and the one after the last."""
    offset = block.ptr - block.chunk.ptr
    return offset // _BYTES, -(-(offset + block.size) // _BYTES)


def _runs(table: bytearray, value: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """The longest runs of pages with a value among those from `first` to `end`."""
    while (begin := table.find(value, first, end)) >= 0:
        stop = table.find(1 - value, begin, end)
        first = end if stop < 0 else stop
        yield begin, first


def _free_runs(chunk: Chunk, stream: int | None) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for block in chunk.blocks():
        if block.is_free and (stream is None or block.stream in (stream, None)):
            start = block.ptr if start is None else start
        elif start is not None:
            yield start, block.ptr
            start = None
    if start is not None:
        yield start, chunk.ptr + chunk.size

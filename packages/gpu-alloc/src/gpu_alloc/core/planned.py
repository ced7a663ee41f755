"""One range of memory that is cut as a plan says, for requests that come as planned.

The k-th request of a size and stream in a step takes the k-th place that the plan has for them, if
it is free. Every other request is placed as without a plan; only when nothing else is left does it
take the best fit between the planned blocks.

Invariant: that of any chunk: blocks cover it, free neighbours of one stream are merged. A place is
handed out only while it is free, whatever the plan says.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import final

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.plan import LifetimePlan


@final
class PlannedRange:
    """A chunk that is cut by `plan`, and how far in it the step has come."""

    def __init__(self, chunk: Chunk, plan: LifetimePlan) -> None:
        self.chunk = chunk
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = []  # of the blocks, sorted
        self._offsets: dict[tuple[int, int], list[int]] = {}
        self._next: dict[tuple[int, int], int] = {}
        for size, stream, offset in plan.places:
            self._offsets.setdefault((size, stream), []).append(offset)
        block = chunk.first
        for stream, start in plan.streams():
            if start:
                block = block.split(chunk.size - start)
            block.stream = stream
            self._list(block)

    def begin(self) -> None:
        """A step begins: each size and stream starts again from its first place."""
        self._next.clear()

    def advance(self, size: int, stream: int) -> None:
        """A request was served, wherever."""
        key = size, stream
        self._next[key] = self._next.get(key, 0) + 1

    def take(self, size: int, stream: int) -> Block | None:
        """The place of the next such request, if the plan has one and it is free."""
        offsets = self._offsets.get((size, stream))
        number = self._next.get((size, stream), 0)
        if offsets is None or number >= len(offsets):
            return None
        return self._cut(self.chunk.ptr + offsets[number], size)

    def take_gap(self, size: int, stream: int) -> Block | None:
        """The smallest free block of at least `size` for a request that is not in the plan."""
        fits = [b for b in self.free_blocks() if b.stream == stream and b.size >= size]
        if not fits:
            return None
        return self._cut(min(fits, key=lambda block: (block.size, block.ptr)).ptr, size)

    def put_back(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours of its stream."""
        block.is_free = True
        block.requested = 0
        self.chunk.num_live -= 1
        for first, second in ((block, block.next), (block.prev, block)):
            if first is None or second is None or first.stream != second.stream:
                continue
            if first.is_free and second.is_free:
                del self._starts[bisect_right(self._starts, second.ptr) - 1]
                del self._blocks[second.ptr]
                first.absorb_next()

    def free_blocks(self) -> Iterator[Block]:
        """By rising address."""
        return (block for block in self.chunk.blocks() if block.is_free)

    def _cut(self, ptr: int, size: int) -> Block | None:
        found = self._blocks[self._starts[bisect_right(self._starts, ptr) - 1]]
        end = found.ptr + found.size
        if not found.is_free or ptr + size > end:
            return None
        if ptr + size < end:
            self._list(found.split(end - ptr - size))
        if found.ptr < ptr:
            found = found.split(size)
            self._list(found)
        found.is_free = False
        self.chunk.num_live += 1
        return found

    def _list(self, block: Block) -> None:
        insort(self._starts, block.ptr)
        self._blocks[block.ptr] = block

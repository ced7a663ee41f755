"""Chunks taken from a source and the blocks that they are cut into.

A block belongs to the stream that it was first taken for; what no stream has used yet belongs to
none (`stream` is None). Blocks are cut from the end, so that what is unused is always one free
block at the start of its chunk.

Invariant: the blocks of a chunk, followed by `next` from `first`, cover the chunk without a gap or
overlap, and two free neighbours never belong to one stream. Blocks link to neighbours of their own
chunk only, so memory of two chunks is never merged even when their addresses touch. All sizes and
addresses are integers in bytes.

>>> chunk = Chunk(ptr=4096, size=1024, pool_index=0, pre_allocated=False)
>>> chunk.is_idle()
True
"""

from typing import final

_OFFSET_BITS = 44  # 16 TiB in one chunk


@final
class Block:
    """One piece of a chunk, free or in use."""

    __slots__ = ("chunk", "is_free", "next", "prev", "ptr", "requested", "serial", "size", "stream")

    def __init__(self, ptr: int, size: int, chunk: "Chunk", stream: int | None) -> None:
        self.ptr = ptr
        self.size = size
        self.chunk = chunk
        self.stream = stream
        self.is_free = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.serial = 0

    def split(self, size: int) -> "Block":
        """Keep the last `size` bytes of this block in a new block, which is returned; this block
        keeps the rest.

        Cutting from the end keeps the remainder's address, as Paddle's AutoGrowthBestFitAllocator
        does.
        """
        left, after = self.size - size, self.next
        self.size = left
        self.next = tail = Block(self.ptr + left, size, self.chunk, self.stream)
        tail.prev, tail.next = self, after
        if after is not None:
            after.prev = tail
        return tail

    def absorb_next(self) -> None:
        """Join the following block of the same chunk to this one."""
        absorbed = self.next
        if absorbed is None:
            return
        self.size += absorbed.size
        self.next = after = absorbed.next
        if after is not None:
            after.prev = self

    def take_end_of_prev(self, size: int) -> bool:
        """Move the last `size` bytes of the block before to this one; True when that was all of it,
        so that the block before is gone.
        """
        before = self.prev
        if before is None:
            return False
        self.ptr -= size
        self.size += size
        before.size -= size
        if before.size:
            return False
        self.prev = None  # only a chunk's first block is ever shortened this way
        self.chunk.first = self
        return True


@final
class Chunk:
    """One piece of memory from the source; `num_live` of its blocks are in use, and `number` of
    its policy's chunks were taken before it. `reserved_bytes` of it are
    counted as having memory behind them.
    """

    __slots__ = (
        "first",
        "num_live",
        "number",
        "pool_index",
        "pre_allocated",
        "ptr",
        "reserved_bytes",
        "shift",
        "size",
    )

    def __init__(
        self,
        *,
        ptr: int,
        size: int,
        pool_index: int,
        pre_allocated: bool,
        number: int = 0,
    ) -> None:
        self.number = number
        # Added to an address it makes a place, by which free lists order: the chunk's number, then
        # the offset. So decisions do not depend on where a source's chunks happen to lie.
        self.shift = (number << _OFFSET_BITS) - ptr
        self.ptr = ptr
        self.size = size
        self.reserved_bytes = 0
        self.pool_index = pool_index
        self.pre_allocated = pre_allocated
        self.num_live = 0
        self.first = Block(ptr, size, self, None)

    def is_idle(self) -> bool:
        """Whether no byte is in use."""
        return self.num_live == 0

    def blocks(self) -> list[Block]:
        """Every block by rising address."""
        found: list[Block] = []
        block: Block | None = self.first
        while block is not None:
            found.append(block)
            block = block.next
        return found

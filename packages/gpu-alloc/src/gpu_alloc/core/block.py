"""Chunks taken from a source and the blocks that they are cut into.

Invariant: the blocks of a chunk, followed by `next` from `first`, cover the chunk without a gap or
overlap, and two neighbours are never both free. Blocks link to neighbours of their own chunk only,
so memory of two chunks is never merged even when their addresses touch. All sizes and addresses are
integers in bytes.

>>> chunk = Chunk(ptr=4096, size=1024, pool_index=0, stream=0, pre_allocated=False)
>>> chunk.is_idle()
True
"""

from typing import final


@final
class Block:
    """One piece of a chunk, free or in use."""

    __slots__ = ("chunk", "is_free", "next", "prev", "ptr", "requested", "serial", "size")

    def __init__(self, ptr: int, size: int, chunk: "Chunk") -> None:
        self.ptr = ptr
        self.size = size
        self.chunk = chunk
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
        tail = Block(self.ptr + self.size - size, size, self.chunk)
        self.size -= size
        tail.prev = self
        tail.next = self.next
        if tail.next is not None:
            tail.next.prev = tail
        self.next = tail
        return tail

    def absorb_next(self) -> None:
        """Join the following block of the same chunk to this one."""
        absorbed = self.next
        if absorbed is None:
            return
        self.size += absorbed.size
        self.next = absorbed.next
        if self.next is not None:
            self.next.prev = self


@final
class Chunk:
    """One piece of memory from the source; `stream` is None until the first block is taken from
    it.
    """

    __slots__ = ("first", "pool_index", "pre_allocated", "ptr", "size", "stream")

    def __init__(
        self, *, ptr: int, size: int, pool_index: int, stream: int | None, pre_allocated: bool
    ) -> None:
        self.ptr = ptr
        self.size = size
        self.pool_index = pool_index
        self.stream = stream
        self.pre_allocated = pre_allocated
        self.first = Block(ptr, size, self)

    def is_idle(self) -> bool:
        """Whether no byte is in use. Relies on neighbours being merged."""
        return self.first.is_free and self.first.next is None

    def blocks(self) -> list[Block]:
        """Every block by rising address."""
        found: list[Block] = []
        block: Block | None = self.first
        while block is not None:
            found.append(block)
            block = block.next
        return found

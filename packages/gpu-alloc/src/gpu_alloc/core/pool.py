"""One pool: its chunks, a free list per stream, splitting, merging and the counters.

A freed block returns to the list of the stream that its chunk belongs to, so memory is never handed
to another stream while work queued on the first one may still use it. Invariant: every byte of
every chunk is in exactly one block, and every free block is in exactly one free list. A pool takes
no lock; its allocator does.

>>> pool = Pool(name="large", index=1, chunk_bytes=0)
>>> pool.add_chunk(ptr=4096, size=2048, stream=0, pre_allocated=False)
>>> pool.take(512, stream=0).ptr
5632
"""

from collections.abc import Iterator
from typing import final

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.core.free_list import FreeList
from gpu_alloc.core.stats import PoolStats


@final
class Pool:
    """Blocks of one size class, which grows by chunks of at least `chunk_bytes`."""

    def __init__(self, *, name: str, index: int, chunk_bytes: int) -> None:
        self.name = name
        self.index = index
        self.chunk_bytes = chunk_bytes
        self.chunks: dict[int, Chunk] = {}
        self._free: dict[int | None, FreeList] = {}
        self.num_live = 0
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.allocated_peak_bytes = 0
        self.requested_peak_bytes = 0
        self.reserved_peak_bytes = 0

    def add_chunk(self, *, ptr: int, size: int, stream: int | None, pre_allocated: bool) -> None:
        """Take over `size` bytes at `ptr`. With `stream=None` the first stream that needs the chunk
        gets it.
        """
        chunk = Chunk(
            ptr=ptr, size=size, pool_index=self.index, stream=stream, pre_allocated=pre_allocated
        )
        self.chunks[ptr] = chunk
        self._free_list(stream).add(chunk.first)
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def remove_chunk(self, chunk: Chunk) -> None:
        """Forget an idle chunk."""
        self._free_list(chunk.stream).remove(chunk.first)
        del self.chunks[chunk.ptr]
        self.reserved_bytes -= chunk.size

    def take(self, size: int, stream: int) -> Block | None:
        """Best fit of `size` bytes (a multiple of the alignment) among the blocks free for
        `stream`, cut to size.
        """
        free = self._free.get(stream)
        block = free.take(size) if free is not None else None
        if block is None:
            block = self._bind_unused_chunk(size, stream)
            if block is None:
                return None
        if block.size > size:
            tail = block.split(size)
            self._free[stream].add(block)
            block = tail
        block.is_free = False
        return block

    def count_use(self, block: Block, requested: int) -> None:
        """Count a block that `take` returned as handed out for `requested` bytes."""
        block.requested = requested
        self.num_live += 1
        self.allocated_bytes += block.size
        self.requested_bytes += requested
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        if self.requested_bytes > self.requested_peak_bytes:
            self.requested_peak_bytes = self.requested_bytes

    def give(self, block: Block) -> None:
        """Take a block in use back, merge it with free neighbours and put the result on its
        stream's list.
        """
        self.num_live -= 1
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        free = self._free_list(block.chunk.stream)
        block.is_free = True
        block.requested = 0
        after = block.next
        if after is not None and after.is_free:
            free.remove(after)
            block.absorb_next()
        before = block.prev
        if before is not None and before.is_free:
            free.remove(before)
            before.absorb_next()
            block = before
        free.add(block)

    def idle_chunks(self, *, include_pre_allocated: bool) -> list[Chunk]:
        """Chunks without a byte in use, by rising address."""
        return [
            self.chunks[ptr]
            for ptr in sorted(self.chunks)
            if self.chunks[ptr].is_idle()
            and (include_pre_allocated or not self.chunks[ptr].pre_allocated)
        ]

    def free_bytes(self, stream: int) -> int:
        """Bytes of this pool's free blocks that `stream` may use."""
        lists = (self._free.get(stream), self._free.get(None))
        return sum(free.total_bytes for free in lists if free is not None)

    def largest_free_bytes(self, stream: int) -> int:
        """Largest request that this pool can serve for `stream` without growing."""
        lists = (self._free.get(stream), self._free.get(None))
        return max((free.largest_bytes() for free in lists if free is not None), default=0)

    def free_entries(self) -> Iterator[tuple[int | None, int, int]]:
        """(stream, address, size) of every block as the free lists hold it."""
        for stream, free in self._free.items():
            for ptr, size in free.entries():
                yield stream, ptr, size

    def stats(self) -> PoolStats:
        """The counters now."""
        return PoolStats(
            allocated_bytes=self.allocated_bytes,
            allocated_peak_bytes=self.allocated_peak_bytes,
            requested_bytes=self.requested_bytes,
            requested_peak_bytes=self.requested_peak_bytes,
            reserved_bytes=self.reserved_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            largest_free_bytes=max(
                (free.largest_bytes() for free in self._free.values()), default=0
            ),
            num_live_blocks=self.num_live,
            num_free_blocks=sum(len(free) for free in self._free.values()),
            num_chunks=len(self.chunks),
        )

    def reset_peaks(self) -> None:
        """Let the peaks start again from the present values."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.requested_peak_bytes = self.requested_bytes
        self.reserved_peak_bytes = self.reserved_bytes

    def _free_list(self, stream: int | None) -> FreeList:
        free = self._free.get(stream)
        if free is None:
            free = self._free[stream] = FreeList()
        return free

    def _bind_unused_chunk(self, size: int, stream: int) -> Block | None:
        unused = self._free.get(None)
        block = unused.take(size) if unused is not None else None
        if block is not None:
            block.chunk.stream = stream
            self._free_list(stream)
        return block

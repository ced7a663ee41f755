"""One pool: its chunks, free places per stream, splitting, merging and the counters.

A freed block returns to the stream that it was taken for, so memory is never handed to another
stream while work queued on the first one may still use it. What no stream has used yet, the start
of a chunk, is free for all: each block that is cut from it belongs to the stream that asked. A free
block that lies right behind such an unused start forms one place with it for its own stream; the
unused start stays a place of its own for the others.

Invariant: every byte of every chunk is in exactly one block. For each stream the places are exactly
the longest runs of blocks that are free and its own or nobody's. A pool takes no lock; its
allocator does.

>>> pool = Pool(name="large", index=1, chunk_bytes=0)
>>> chunk = pool.add_chunk(ptr=4096, size=2048, pre_allocated=False, number=0)
>>> pool.take(512, stream=0).ptr, pool.take(512, stream=7).ptr
(5632, 5120)
"""

from collections.abc import Iterator
from typing import final

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.core.free_list import ADDRESS_MASK, FreeList
from gpu_alloc.core.planned import PlannedRange
from gpu_alloc.core.stats import PoolStats
from gpu_alloc.plan import LifetimePlan

_KEPT_LISTS = 8


@final
class Pool:
    """Blocks of one size class, which grows by chunks of at least `chunk_bytes`."""

    def __init__(self, *, name: str, index: int, chunk_bytes: int) -> None:
        self.name = name
        self.index = index
        self.chunk_bytes = chunk_bytes
        self.chunks: dict[int, Chunk] = {}
        self.planned: PlannedRange | None = None  # one of the chunks, which free lists leave out
        self._places: dict[int | None, FreeList] = {}  # of each stream
        # Unused starts of chunks: under None those that join with no free block behind them, under
        # a stream those that are also the beginning of a place of that stream.
        self._unused: dict[int | None, FreeList] = {None: FreeList()}
        self.num_live = 0
        self.allocated_bytes = 0
        self.requested_bytes = 0
        self.reserved_bytes = 0
        self.allocated_peak_bytes = 0
        self.requested_peak_bytes = 0
        self.reserved_peak_bytes = 0

    def add_chunk(
        self,
        *,
        ptr: int,
        size: int,
        pre_allocated: bool,
        number: int,
        is_paged: bool = False,
        plan: LifetimePlan | None = None,
    ) -> Chunk:
        """Take over `size` bytes at `ptr`, which belong to no stream until one uses them.

        number: rises from chunk to chunk, also over the pools of a policy. is_paged: no memory is
        behind them until `count_reserved` says so. plan: what the bytes are kept for.
        """
        chunk = Chunk(
            ptr=ptr,
            size=size,
            pool_index=self.index,
            pre_allocated=pre_allocated,
            number=number,
        )
        self.chunks[ptr] = chunk
        if plan is None:
            self._add_unused(None, chunk.first)
        else:
            self.planned = PlannedRange(chunk, plan)
        self.count_reserved(chunk, 0 if is_paged else size)
        return chunk

    def count_reserved(self, chunk: Chunk, num_bytes: int) -> None:
        """Count bytes of a chunk that got memory, or with a negative number lost it."""
        chunk.reserved_bytes += num_bytes
        self.reserved_bytes += num_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def remove_chunk(self, chunk: Chunk) -> None:
        """Forget an idle chunk."""
        if self.planned is not None and chunk is self.planned.chunk:
            self.planned = None
        else:
            for block in chunk.blocks():
                if block.stream is not None:
                    self._pull(block)
            if chunk.first.stream is None:
                self._remove_unused(None, chunk.first)
        del self.chunks[chunk.ptr]
        self.reserved_bytes -= chunk.reserved_bytes

    def take(self, size: int, stream: int) -> Block | None:
        """Best fit of `size` bytes (a multiple of the alignment) among the places free for
        `stream`, cut to size.
        """
        places = self._places.get(stream)
        key = places.find(size) if places is not None else 0
        for owner, unused in self._unused.items():
            if owner != stream and unused.total_bytes:
                other = unused.find(size)
                if other and (not key or other < key):
                    key, places = other, unused
        if not key or places is None:
            return None
        block = places.blocks[key & ADDRESS_MASK]
        if block.stream is None:
            block = self._cut_unused(block, size, stream)
        elif block.size > size:
            old_size = block.size
            tail = block.split(size)
            self._resize(block, old_size)
            block = tail
        else:
            block = self._cut_place(block, size)
        block.is_free = False
        block.chunk.num_live += 1
        return block

    def count_use(self, block: Block, requested: int) -> None:
        """Count a block that `take` returned as handed out for `requested` bytes."""
        block.requested = requested
        self.num_live += 1
        self.allocated_bytes = allocated = self.allocated_bytes + block.size
        self.requested_bytes = total = self.requested_bytes + requested
        if allocated > self.allocated_peak_bytes:
            self.allocated_peak_bytes = allocated
        if total > self.requested_peak_bytes:
            self.requested_peak_bytes = total

    def give(self, block: Block) -> None:
        """Take a block in use back, merge it with free neighbours and put the result on its
        stream's list.
        """
        self.num_live -= 1
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        self.put_back(block)

    def put_back(self, block: Block) -> None:
        """`give` of a block that was not counted yet."""
        if self.planned is not None and block.chunk is self.planned.chunk:
            self.planned.put_back(block)
            return
        block.is_free = True
        block.requested = 0
        chunk, stream = block.chunk, block.stream
        chunk.num_live -= 1
        after, before = block.next, block.prev
        if after is not None and after.is_free and after.stream == stream:
            # Behind a block in use, so that it is a place by itself.
            self._places[stream].remove(after.ptr + chunk.shift, after.size)
            block.absorb_next()
        if before is not None and before.is_free and before.stream == stream:
            size = before.size
            before.absorb_next()
            self._resize(before, size)
        else:
            self._put(block)

    def idle_chunks(self, *, include_pre_allocated: bool, stream: int | None = None) -> list[Chunk]:
        """Chunks without a byte in use, the oldest first; with `stream` those that no other
        stream has used.
        """
        return [
            chunk
            for chunk in self.chunks.values()
            if chunk.is_idle()
            and (include_pre_allocated or not chunk.pre_allocated)
            and (stream is None or {b.stream for b in chunk.blocks()} <= {stream, None})
        ]

    def free_bytes(self, stream: int) -> int:
        """Bytes of this pool's free blocks that `stream` may use."""
        unplanned = sum(places.total_bytes for places in self._free_for(stream))
        return unplanned + sum(self._gaps(stream))

    def largest_free_bytes(self, stream: int) -> int:
        """Largest request that this pool can serve for `stream` without growing."""
        unplanned = max((places.largest_bytes() for places in self._free_for(stream)), default=0)
        return max(unplanned, *self._gaps(stream), 0)

    def free_entries(self) -> Iterator[tuple[int | None, int, int]]:
        """(stream, address, size) of every place as the free lists hold it; None: for any."""
        lists: list[tuple[int | None, FreeList]] = [*self._places.items()]
        lists += [(None, unused) for unused in self._unused.values()]
        for stream, places in lists:
            for place, size in places.entries():
                yield stream, place - places.blocks[place].chunk.shift, size

    def stats(self) -> PoolStats:
        """The counters now."""
        gaps = self._gaps(None)
        return PoolStats(
            allocated_bytes=self.allocated_bytes,
            allocated_peak_bytes=self.allocated_peak_bytes,
            requested_bytes=self.requested_bytes,
            requested_peak_bytes=self.requested_peak_bytes,
            reserved_bytes=self.reserved_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            largest_free_bytes=max(
                self._unused[None].largest_bytes(),
                max((places.largest_bytes() for places in self._places.values()), default=0),
                max(gaps, default=0),
            ),
            num_live_blocks=self.num_live,
            num_free_blocks=len(self._unused[None])
            + sum(map(len, self._places.values()))
            + len(gaps),
            num_chunks=len(self.chunks),
        )

    def reset_peaks(self) -> None:
        """Let the peaks start again from the present values."""
        self.allocated_peak_bytes = self.allocated_bytes
        self.requested_peak_bytes = self.requested_bytes
        self.reserved_peak_bytes = self.reserved_bytes

    def _free_for(self, stream: int) -> Iterator[FreeList]:
        if stream in self._places:
            yield self._places[stream]
        for owner, unused in self._unused.items():
            if owner != stream:
                yield unused

    def _gaps(self, stream: int | None) -> list[int]:
        """Sizes of the free blocks between those of a plan; None: of all streams."""
        free = () if self.planned is None else self.planned.free_blocks()
        return [block.size for block in free if stream is None or block.stream == stream]

    def _put(self, block: Block) -> None:
        """List a free block of a stream, as one place with the unused memory before it."""
        stream, unused = block.stream, block.prev
        if stream is None:
            return
        places = self._places.get(stream)
        if places is None:
            places = self._places[stream] = FreeList()
        shift = block.chunk.shift
        if unused is None or unused.stream is not None:
            places.add(block.ptr + shift, block.size, block)
            return
        places.add(unused.ptr + shift, unused.size + block.size, block)
        if stream not in self._unused:
            self._unused[stream] = FreeList()
        self._remove_unused(None, unused)
        self._add_unused(stream, unused)

    def _pull(self, block: Block) -> None:
        """Undo `_put`."""
        stream, unused = block.stream, block.prev
        if stream is None:
            return
        shift = block.chunk.shift
        if unused is None or unused.stream is not None:
            self._places[stream].remove(block.ptr + shift, block.size)
            return
        self._places[stream].remove(unused.ptr + shift, unused.size + block.size)
        self._remove_unused(stream, unused)
        self._add_unused(None, unused)
        if len(self._unused) > _KEPT_LISTS and not self._unused[stream].blocks:
            del self._unused[stream]  # streams come and go, and `take` looks into each list

    def _resize(self, block: Block, old_size: int) -> None:
        """List a free block that has grown or shrunk at its end; what is before it stays there."""
        first, size, unused = block.ptr, block.size, block.prev
        if unused is not None and unused.stream is None:
            first = unused.ptr
            old_size += unused.size
            size += unused.size
        self._places[block.stream].resize(first + block.chunk.shift, old_size, size)

    def _add_unused(self, stream: int | None, unused: Block) -> None:
        self._unused[stream].add(unused.ptr + unused.chunk.shift, unused.size, unused)

    def _remove_unused(self, stream: int | None, unused: Block) -> None:
        self._unused[stream].remove(unused.ptr + unused.chunk.shift, unused.size)

    def _cut_place(self, block: Block, size: int) -> Block:
        """The last `size` bytes of the place of a stream's free block, which has no more."""
        self._pull(block)
        if block.size == size:
            return block
        unused = block.prev
        if unused is not None:
            self._remove_unused(None, unused)
            if not block.take_end_of_prev(size - block.size):
                self._add_unused(None, unused)
        return block

    def _cut_unused(self, unused: Block, size: int, stream: int) -> Block:
        """The last `size` bytes of unused memory, which are `stream`'s from now on."""
        after = unused.next
        if after is not None and after.is_free:
            self._pull(after)
        self._remove_unused(None, unused)
        block = unused
        if unused.size > size:
            block = unused.split(size)
            self._add_unused(None, unused)
        block.stream = stream
        block.is_free = False
        if after is not None and after.is_free:
            self._put(after)
        return block

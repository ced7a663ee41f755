"""Where a request is placed: two pools over one source, and what is tried when memory is short.

Small requests go to one pool and large ones to the other, so small blocks cannot splinter the
chunks that large ones need. The policy is that of Paddle's two-pool AutoGrowthBestFitAllocator:
true best fit in the free list of the request's stream, else growth by a chunk. When the source or
the limit refuses, these are tried in order: give idle chunks back and grow again, grow by the exact
request instead of a whole chunk, borrow a free block of the other pool, take one that a plan keeps
and, when the caller says that nothing else is left, give idle pre-allocated chunks back.

While a plan is followed (`core/planned.py`), a request that it has takes its place in the plan's
range, and only others come this way. The range belongs to the large pool and is pre-allocated.

On a source that maps pages, chunks are address space: a place is found as ever, and pages without
memory under it are mapped; when memory is short, the pages of free blocks are unmapped first.

Invariant: the bytes taken from the source never exceed the limit in force when they were taken. No
locking: the allocator that owns a policy serialises the calls.

>>> from gpu_alloc.sources import AddressSource
>>> policy = TwoPoolPolicy(AddressSource(), AllocatorConfig())
>>> policy.take(requested=1000, stream=0, last_resort=False).size
1024
"""

from dataclasses import replace
from typing import final

from gpu_alloc.core.block import Block, Chunk
from gpu_alloc.core.config import MIB, AllocatorConfig
from gpu_alloc.core.oom import OomReport, OutOfMemoryError
from gpu_alloc.core.pages import Pages
from gpu_alloc.core.pool import Pool
from gpu_alloc.core.stats import PoolStats, Stats
from gpu_alloc.plan import LifetimePlan, check_in_use, check_plan
from gpu_alloc.sources import ChunkSource, PagedSource, check_alignment, round_up


@final
class TwoPoolPolicy:
    """The pools and counters of one allocator.

    Raises AllocValueError when the source aligns chunks to less than `alignment_size`, and
    OutOfMemoryError when the pre-allocation does not fit.
    """

    def __init__(self, source: ChunkSource, config: AllocatorConfig) -> None:
        check_alignment(config.alignment_size, source)
        config.check_source(source)
        self._config = config
        self._source = source
        self._pages = Pages(source) if isinstance(source, PagedSource) else None
        self._drops_idle = config.free_idle_chunk and self._pages is None
        self._align_mask = config.alignment_size - 1
        self._small_limit_bytes = config.small_pool_size_in_mb * MIB
        self.small = Pool(
            name="small", index=0, chunk_bytes=config.small_pool_auto_growth_chunk_size_in_mb * MIB
        )
        self.large = Pool(name="large", index=1, chunk_bytes=config.large_chunk_bytes())
        self.pools = (self.small, self.large)
        self.limit_bytes = config.memory_limit_in_mb * MIB
        self._num_source_calls = 0
        self._num_chunks = 0
        self.num_planned = self.num_unplanned = 0
        self._reserved_peak_bytes = 0
        self._allocated_peak_bytes = 0
        self._requested_peak_bytes = 0
        if self._pages is not None:
            return
        if config.small_pool_size_in_mb:
            self._pre_allocate(self.small, config.small_pool_pre_alloc_in_mb * MIB)
        self._pre_allocate(self.large, config.large_pool_pre_alloc_in_mb * MIB)

    def take(self, requested: int, stream: int, last_resort: bool) -> Block | None:
        """Place `requested` bytes or return None; `last_resort` may use up the pre-allocation."""
        size = (requested + self._align_mask) & ~self._align_mask
        small, large = self.pools
        planned = large.planned
        block = None if planned is None else self._backed(planned.take(size, stream))
        is_planned = block is not None
        if block is None:
            pool = large if size > self._small_limit_bytes else small
            block = pool.take(size, stream)
            if block is None:
                block = self._find_room(pool, size, stream, last_resort=last_resort)
            if self._pages is not None:
                block = self._backed(block)
            if block is None:
                return None
        if planned is not None:
            planned.advance(size, stream)
            self.num_planned += is_planned
            self.num_unplanned += not is_planned
        self.pools[block.chunk.pool_index].count_use(block, requested)
        allocated = small.allocated_bytes + large.allocated_bytes
        if allocated > self._allocated_peak_bytes:
            self._allocated_peak_bytes = allocated
        total_requested = small.requested_bytes + large.requested_bytes
        if total_requested > self._requested_peak_bytes:
            self._requested_peak_bytes = total_requested
        return block

    def follow(self, plan: LifetimePlan | None) -> bool:
        """Keep a range of memory for a plan, in place of that of the plan before; None: for none.

        False, and none is followed, when there is no room for the range. Raises AllocValueError
        while blocks of the plan before are in use, or for another alignment.
        """
        check_plan(plan, self._config.alignment_size)
        if self.large.planned is not None:
            chunk = self.large.planned.chunk
            check_in_use(chunk.num_live)
            self._release(self.large, chunk)
        self.num_planned = self.num_unplanned = 0
        if plan is None:
            return True
        size = round_up(plan.size_bytes, self._source.granularity_bytes)
        if self._grow(self.large, size, pre_allocated=True, plan=plan):
            return True
        self.release_idle(include_pre_allocated=False)
        return self._grow(self.large, size, pre_allocated=True, plan=plan)

    def begin_step(self) -> None:
        """The requests of the plan begin again."""
        if self.large.planned is not None:
            self.large.planned.begin()

    def give(self, block: Block, drop_idle: bool) -> None:
        """Take a block back, and with `drop_idle` release its chunk when nothing in it is used."""
        chunk = block.chunk
        pool = self.pools[chunk.pool_index]
        pool.give(block)
        if chunk.num_live:
            return
        if drop_idle or (self._drops_idle and not chunk.pre_allocated):
            self._release(pool, chunk)

    def release_idle(self, *, include_pre_allocated: bool, stream: int | None = None) -> int:
        """Give the idle chunks of all streams, or of one, back to the source; returns their
        bytes.
        """
        if self._pages is not None:
            return self._release_pages(self._pages, include_pre_allocated, stream)
        released = 0
        for pool in self.pools:
            for chunk in pool.idle_chunks(
                include_pre_allocated=include_pre_allocated, stream=stream
            ):
                self._release(pool, chunk)
                released += chunk.size
        return released

    def stats(self) -> Stats:
        """The counters now."""
        return Stats(
            small=self._stats_of(self.small),
            large=self._stats_of(self.large),
            allocated_peak_bytes=self._allocated_peak_bytes,
            requested_peak_bytes=self._requested_peak_bytes,
            reserved_peak_bytes=self._reserved_peak_bytes,
            num_source_calls=self._num_source_calls + (self._pages.num_calls if self._pages else 0),
        )

    def reset_peaks(self) -> None:
        """Let every peak start again from its present value."""
        for pool in self.pools:
            pool.reset_peaks()
        self._reserved_peak_bytes = self._reserved_bytes()
        self._allocated_peak_bytes = sum(pool.allocated_bytes for pool in self.pools)
        self._requested_peak_bytes = sum(pool.requested_bytes for pool in self.pools)

    def report(
        self, requested: int, stream: int, *, pool: Pool | None = None, waiting_bytes: int = 0
    ) -> OomReport:
        """The numbers behind a request that `take` refused."""
        size = self._padded(requested)
        usable = sum(each.free_bytes(stream) for each in self.pools)
        largest = max(each.largest_free_bytes(stream) for each in self.pools)
        if self._pages is not None:  # of addresses there are always enough
            usable = min(
                usable, self._reserved_bytes() - sum(p.allocated_bytes for p in self.pools)
            )
        return OomReport(
            requested_bytes=requested,
            padded_bytes=size,
            pool=(self._home(size) if pool is None else pool).name,
            stream=stream,
            stats=self.stats(),
            limit_bytes=self.limit_bytes,
            usable_bytes=usable,
            largest_usable_bytes=min(largest, usable),
            waiting_bytes=waiting_bytes,
        )

    def _padded(self, requested: int) -> int:
        return (requested + self._align_mask) & ~self._align_mask

    def _home(self, size: int) -> Pool:
        return self.large if size > self._small_limit_bytes else self.small

    def _reserved_bytes(self) -> int:
        return self.small.reserved_bytes + self.large.reserved_bytes

    def _find_room(self, pool: Pool, size: int, stream: int, *, last_resort: bool) -> Block | None:
        """The order of the module's docstring, after the home pool's free list had nothing."""
        granularity = self._source.granularity_bytes
        exact = round_up(size, granularity)
        if isinstance(self._source, PagedSource):
            self._grow(pool, max(exact, self._source.range_bytes))
            return pool.take(size, stream)
        chunk = max(exact, round_up(pool.chunk_bytes, granularity))
        if self._config.free_when_no_cache_hit:
            self.release_idle(include_pre_allocated=False)
        if self._grow(pool, chunk):
            return pool.take(size, stream)
        released = self.release_idle(include_pre_allocated=False)
        if (released and self._grow(pool, chunk)) or self._grow(pool, exact):
            return pool.take(size, stream)
        other = self.small if pool is self.large else self.large
        block = other.take(size, stream)
        if block is None and self.large.planned is not None:
            block = self.large.planned.take_gap(size, stream)
        if block is None and last_resort and self.release_idle(include_pre_allocated=True):
            self._grow(pool, exact)
            block = pool.take(size, stream)
        return block

    def _grow(
        self,
        pool: Pool,
        size: int,
        *,
        pre_allocated: bool = False,
        plan: LifetimePlan | None = None,
    ) -> bool:
        is_paged = self._pages is not None
        reserved = self._reserved_bytes() + (0 if is_paged else size)
        if not is_paged and self.limit_bytes and reserved > self.limit_bytes:
            return False
        self._num_source_calls += 1
        ptr = self._source.acquire(size)
        if ptr is None:
            return False
        chunk = pool.add_chunk(
            ptr=ptr,
            size=size,
            pre_allocated=pre_allocated,
            number=self._num_chunks,
            is_paged=is_paged,
            plan=plan,
        )
        if self._pages is not None:
            self._pages.add(chunk)
        self._num_chunks += 1
        self._reserved_peak_bytes = max(self._reserved_peak_bytes, reserved)
        return True

    def _backed(self, block: Block | None) -> Block | None:
        """A block with memory behind it; None, and the block is free again, without."""
        if block is None or self._pages is None:
            return block
        is_backed = False
        try:
            is_backed = self._back(block, self._pages)
        finally:  # also when the source raises
            if not is_backed:
                self.pools[block.chunk.pool_index].put_back(block)
        return block if is_backed else None

    def _back(self, block: Block, pages: Pages) -> bool:
        """Have memory behind a block, at the cost of free ones where it is short."""
        for is_short in (False, True):
            if is_short and not self._release_pages(pages, False, None):
                return False
            missing = pages.num_missing(block) * self._source.granularity_bytes
            reserved = self._reserved_bytes() + missing
            if missing and self.limit_bytes and reserved > self.limit_bytes:
                continue
            if pages.map(block):
                self.pools[block.chunk.pool_index].count_reserved(block.chunk, missing)
                self._reserved_peak_bytes = max(self._reserved_peak_bytes, reserved)
                return True
        return False

    def _release_pages(self, pages: Pages, include_ranges: bool, stream: int | None) -> int:
        """Unmap what only free blocks touch, and give idle ranges of addresses back."""
        released = 0
        for pool in self.pools:
            for chunk in list(pool.chunks.values()):
                found = pages.unmap_free(chunk, stream)
                pool.count_reserved(chunk, -found)
                released += found
                if include_ranges and stream is None and chunk.is_idle():
                    self._release(pool, chunk)
        return released

    def _stats_of(self, pool: Pool) -> PoolStats:
        stats = pool.stats()
        if self._pages is None:
            return stats
        return replace(stats, largest_free_bytes=min(stats.largest_free_bytes, stats.free_bytes))

    def _pre_allocate(self, pool: Pool, size: int) -> None:
        size = round_up(size, self._source.granularity_bytes)
        if size and not self._grow(pool, size, pre_allocated=True):
            report = self.report(size, 0, pool=pool)
            self.release_idle(include_pre_allocated=True)
            raise OutOfMemoryError(report)

    def _release(self, pool: Pool, chunk: Chunk) -> None:
        if self._pages is not None:
            pool.count_reserved(chunk, -self._pages.unmap_free(chunk))
            self._pages.drop(chunk)
        pool.remove_chunk(chunk)
        self._num_source_calls += 1
        self._source.release(chunk.ptr, chunk.size)

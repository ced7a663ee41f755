"""What a malloc and free cost among 100,000 free blocks, over what they cost among 100.

    python benchmarks/gpu_alloc_scaling.py

Our free list bins sizes and keeps a bitmap of the bins; the peer is the same allocator over the
plain structure, one sorted list of sizes and addresses. Both run alternately in one process, on
equal requests.
"""

import json
import random
import statistics
import time
from bisect import bisect_left, insort

import gpu_alloc.core.pool
from gpu_alloc import AddressSource, AllocatorConfig, TwoPoolAllocator
from gpu_alloc.core.block import Block
from gpu_alloc.core.free_list import FreeList

FEW, MANY = 100, 100_000
PAIRS = 4_000
ROUNDS = 9
MIN_SIZE, MAX_SIZE = 2 << 20, 64 << 20


class SortedListFreeList:
    """The peer: best fit by bisection of one sorted list."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, ptr: int, size: int, block: Block) -> None:
        """As FreeList.add."""
        insort(self.keys, size << 96 | ptr)
        self.blocks[ptr] = block
        self.total_bytes += size

    def remove(self, ptr: int, size: int) -> Block:
        """As FreeList.remove."""
        del self.keys[bisect_left(self.keys, size << 96 | ptr)]
        self.total_bytes -= size
        return self.blocks.pop(ptr)

    def resize(self, ptr: int, old_size: int, size: int) -> None:
        """As FreeList.resize."""
        self.add(ptr, size, self.remove(ptr, old_size))

    def find(self, size_bytes: int) -> int:
        """As FreeList.find."""
        position = bisect_left(self.keys, size_bytes << 96)
        return self.keys[position] if position < len(self.keys) else 0

    def block_of(self, key: int) -> Block:
        """As FreeList.block_of."""
        return self.blocks[key & (1 << 96) - 1]


def fragmented(free_list: type, num_free: int, seed: int) -> TwoPoolAllocator:
    """An allocator whose one chunk holds `num_free` free blocks of random sizes between used
    ones.
    """
    original = gpu_alloc.core.pool.FreeList
    gpu_alloc.core.pool.FreeList = free_list
    try:
        # A free list is made when a stream first needs one, so fill while the class is in place.
        rng = random.Random(seed)
        slab_mb = 2 * num_free * (MAX_SIZE >> 20) + 64
        allocator = TwoPoolAllocator(
            AddressSource(), AllocatorConfig(large_pool_pre_alloc_in_mb=slab_mb)
        )
        blocks = [allocator.malloc(rng.randrange(MIN_SIZE, MAX_SIZE)) for _ in range(2 * num_free)]
        for block in blocks[::2]:
            allocator.free(block.ptr)
    finally:
        gpu_alloc.core.pool.FreeList = original
    return allocator


def seconds(allocator: TwoPoolAllocator, sizes: list[int]) -> float:
    start = time.process_time()
    for size in sizes:
        allocator.free(allocator.malloc(size).ptr)
    return time.process_time() - start


def main() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    print(f"seed {seed}")
    sides = {
        name: (fragmented(kind, FEW, seed), fragmented(kind, MANY, seed))
        for name, kind in (("ours", FreeList), ("sorted list", SortedListFreeList))
    }
    growth: dict[str, list[float]] = {name: [] for name in sides}
    crowded: list[float] = []
    for _ in range(ROUNDS):
        sizes = [rng.randrange(MIN_SIZE, MAX_SIZE) for _ in range(PAIRS)]
        at_many = {}
        for name, (few, many) in sides.items():
            at_many[name] = seconds(many, sizes)
            growth[name].append(at_many[name] / seconds(few, sizes))
        crowded.append(at_many["ours"] / at_many["sorted list"])
    for name, values in growth.items():
        print(f"{name}: {MANY} free blocks cost {statistics.median(values):.2f}x of {FEW}")
    for figure, values in (
        ("gpu_alloc_scaling", growth["ours"]),
        ("gpu_alloc_scaling_over_sorted_list", crowded),
    ):
        record = {"figure": figure, "value": round(statistics.median(values), 3), "unit": "x"}
        record |= {"low": round(min(values), 3), "high": round(max(values), 3), "n": len(values)}
        print(json.dumps(record))


if __name__ == "__main__":
    main()

"""What the arena holds, under the names of `torch.cuda.memory_stats`.

Invariant: a key means what torch's does; keys of things that we have not are left out.
"""

from gpu_alloc.core import PoolStats, Stats
from gpu_alloc.native import Arena, Totals

_POOLS = {"small_pool": ("small",), "large_pool": ("large",), "all": ("small", "large")}


def memory_stats(arena: Arena, device: int = 0) -> dict[str, int]:
    """Counters of a device as `torch.cuda.memory_stats` names them, for the arena of `replace`.

    "segment" is one of our chunks. Peaks of "all" are those of both pools together. All are 0 for
    a device that has not been used, of which nothing is pre-allocated for the question.
    """
    stats, totals = Stats(small=PoolStats(), large=PoolStats()), Totals(0, 0, 0, 0, 0, 0)
    if device in arena.devices():
        allocator = arena.allocator(device)
        stats, totals = allocator.stats(), allocator.totals()
    found: dict[str, int] = {}
    for name, members in _POOLS.items():
        pools: list[PoolStats] = [getattr(stats, member) for member in members]
        for word in ("allocated", "requested", "reserved"):
            current = sum(getattr(pool, f"{word}_bytes") for pool in pools)
            found[f"{word}_bytes.{name}.current"] = current
            holder = stats if name == "all" else pools[0]
            found[f"{word}_bytes.{name}.peak"] = getattr(holder, f"{word}_peak_bytes")
        found[f"allocation.{name}.current"] = sum(pool.num_live_blocks for pool in pools)
        found[f"segment.{name}.current"] = sum(pool.num_chunks for pool in pools)
        found[f"inactive_split.{name}.current"] = sum(pool.num_free_blocks for pool in pools)
        found[f"inactive_split_bytes.{name}.current"] = sum(pool.free_bytes for pool in pools)
    found["allocation.all.allocated"] = totals.num_mallocs
    found["allocation.all.freed"] = totals.num_frees
    found["allocated_bytes.all.allocated"] = totals.malloced_bytes
    found["allocated_bytes.all.freed"] = totals.freed_bytes
    found["num_alloc_retries"] = totals.num_retries
    found["num_ooms"] = totals.num_ooms
    return found

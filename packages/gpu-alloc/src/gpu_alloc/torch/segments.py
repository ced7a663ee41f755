"""A pool of torch's whose segments are cut from our memory.

torch's caching allocator stays in place, with its statistics, snapshots and out-of-memory errors;
what it takes from CUDA as segments comes from the arena instead, by C symbols of the compiled core.

torch lets one thread at a time use a pool, inside `torch.cuda.use_mem_pool`; call `segments` once
for each thread, and all draw on one arena. What autograd's threads allocate during a backward pass
comes from torch's default pool.

    pool = segments(AllocatorConfig(large_pool_pre_alloc_in_mb=60_000))
    with torch.cuda.use_mem_pool(pool):
        train()

Invariant: no Python is called while torch holds its allocator's lock.
"""

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.torch._torch_private import custom_allocator, torch
from gpu_alloc.torch.runtime import open_arena


def segments(config: AllocatorConfig | None = None) -> torch.cuda.MemPool:
    """A `torch.cuda.MemPool` over the process's arena; None: `AllocatorConfig.from_env()`.

    The pre-allocation is taken on each device when its first segment is. Raises AllocError when the
    arena has other settings, NativeUnavailableError without a compiled core.
    """
    arena = open_arena(config)
    functions = arena.symbol("ga_segment_malloc"), arena.symbol("ga_segment_free")
    return torch.cuda.MemPool(custom_allocator(*functions))

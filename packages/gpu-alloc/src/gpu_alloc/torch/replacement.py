"""Our allocator in place of torch's own, for every CUDA tensor of the process.

torch calls C symbols of the compiled core, also from autograd's threads. A request that finds no
memory raises: torch makes a RuntimeError ("std::bad_alloc") of it, not its OutOfMemoryError, which
only its own allocator can raise; `arena(device).last_report()` says why. torch's statistics and
snapshots are of its own allocator, which serves nothing any more: see `memory_stats`.

Invariant: a request never ends in a tensor without memory.
"""

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.native import Arena
from gpu_alloc.torch._torch_private import custom_allocator, make_current
from gpu_alloc.torch.runtime import open_arena


def replace(config: AllocatorConfig | None = None) -> Arena:
    """Serve torch from the process's arena from here on; None: `AllocatorConfig.from_env()`.

    To be called before torch has used CUDA. The pre-allocation is taken on each device at its first
    request. Raises AllocError when the arena has other settings, RuntimeError (from torch) when
    torch has used its own allocator, NativeUnavailableError without a compiled core.
    """
    arena = open_arena(config)
    functions = arena.symbol("ga_replace_malloc"), arena.symbol("ga_segment_free")
    allocator = custom_allocator(*functions)
    allocator.set_record_stream_fn(arena.symbol("ga_replace_record_stream"))
    allocator.set_reset_fn(arena.symbol("ga_replace_empty_cache"))
    make_current(allocator)
    return arena

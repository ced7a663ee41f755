"""The memory objects that a `CupyPool` hands out, and CuPy's hooks.

They are on the path of every allocation, so a block is one object: CuPy's memory, whose end frees
it. Importing this module imports no cupy.

Invariant: a block is freed exactly once, when the last array on it dies, also where a hook raises,
during garbage collection inside an allocation, and at interpreter exit.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from gpu_alloc.sources import import_cupy

Hooks = Mapping[str, Any]


@cache
def hooks_of_thread() -> Callable[[], Hooks]:
    """CuPy's function that gives the hooks which this thread has entered."""
    of_thread: Callable[[], Hooks] = import_cupy().cuda.memory_hook.get_memory_hooks
    return of_thread


def call_hooks(hooks: Hooks, name: str, **facts: int) -> None:
    """Call one method of every hook, with CuPy's arguments."""
    for hook in hooks.values():
        getattr(hook, name)(**facts)


@cache
def block_classes() -> tuple[Any, Any]:
    """Classes of memory objects, for blocks of any allocator and of a `NativeAllocator`: CuPy's
    `UnownedMemory` that frees its block of `allocator`, which is set once the object is made.
    """
    # Held by the functions: a module's names may be gone by interpreter exit, its arrays not.
    is_exiting, hooks_now, free_slowly = sys.is_finalizing, hooks_of_thread(), _free_slowly

    class PoolMemory(import_cupy().cuda.memory.UnownedMemory):  # type: ignore[misc]
        """A block of a `CupyPool`, which its end gives back."""

        __slots__ = ("allocator",)

        def __del__(self) -> None:
            # At interpreter exit the process's memory goes as a whole; CUDA may be gone already.
            if not is_exiting():
                free_slowly(hooks_now(), self)

    class NativeMemory(PoolMemory):
        """The same in fewer calls."""

        __slots__ = ()

        def __del__(self) -> None:
            if is_exiting():
                return
            hooks = hooks_now()
            if hooks:
                free_slowly(hooks, self)
                return
            allocator, ptr = self.allocator, self.ptr
            refused = allocator.try_free(ptr)
            if refused or allocator.kept.any:
                allocator.raise_of_free(ptr, refused)

    return PoolMemory, NativeMemory


def _free_slowly(hooks: Hooks, memory: Any) -> None:
    if not hooks:
        memory.allocator.free(memory.ptr)
        return
    facts = {
        "device_id": memory.device_id,
        "mem_size": memory.size,
        "mem_ptr": memory.ptr,
        "pmem_id": id(memory),
    }
    try:
        call_hooks(hooks, "free_preprocess", **facts)
    finally:
        try:
            memory.allocator.free(memory.ptr)
        finally:
            call_hooks(hooks, "free_postprocess", **facts)

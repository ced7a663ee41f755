"""CuPy's memory served by our allocator, through CuPy's public `set_allocator`.

One allocator per device: the compiled core, or the Python core where there is none. A block belongs
to the stream that was current when it was allocated and returns to that stream's free list whatever
stream is current when it is freed, so reuse is ordered by the stream itself. As with CuPy's own
pool, an array used on a second stream must be kept alive (or the streams synchronised) until that
work is done. CuPy's memory hooks, which CuPy calls only for its own pool, are called here in the
same order; those of chunks only where the pool does not share memory with torch.

Importing this module imports no cupy; `CupyPool` does. Invariant: what a pool's allocator hands out
is owned by one memory object (memory.py), whose end frees it.

    pool = CupyPool(AllocatorConfig(large_pool_pre_alloc_in_mb=1024))
    with cupy.cuda.using_allocator(pool.malloc):
        ...
    print(pool.stats().reserved_peak_bytes)
"""

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, final

from gpu_alloc.core import AllocatorConfig, OutOfMemoryError, Stats, TwoPoolAllocator
from gpu_alloc.cupy.backend import CudaBackend, CupyBackend
from gpu_alloc.cupy.memory import Hooks, block_classes, call_hooks, hooks_of_thread
from gpu_alloc.cupy.sharing import (
    PoolAllocator,
    Share,
    check_share,
    own_allocator,
    shared_allocator,
)
from gpu_alloc.cupy.versions import warn_of_cuda_versions
from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.native import NativeAllocator
from gpu_alloc.plan import LifetimePlan, PlanUse, check_plan
from gpu_alloc.sources import ChunkSource, PagedSource, import_cupy, round_up


@final
class _HookedSource(ChunkSource):
    """Calls CuPy's `alloc_*` hooks around what really comes from the device."""

    def __init__(self, inner: ChunkSource, device_id: int) -> None:
        self.alignment_bytes = inner.alignment_bytes
        self.granularity_bytes = inner.granularity_bytes
        self._inner = inner
        self._device_id = device_id

    def acquire(self, size_bytes: int) -> int | None:
        take = partial(self._inner.acquire, size_bytes)
        return _hooked(self._device_id, size_bytes, take, self._inner.release)

    def release(self, ptr: int, size_bytes: int) -> None:
        self._inner.release(ptr, size_bytes)


@final
class _HookedPages(PagedSource):
    """Likewise, where memory comes from the device as pages."""

    def __init__(self, inner: PagedSource, device_id: int) -> None:
        self._inner = inner
        self._device_id = device_id

    def acquire(self, size_bytes: int) -> int | None:
        return self._inner.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        self._inner.release(ptr, size_bytes)

    def map(self, ptr: int, size_bytes: int) -> bool:
        def take() -> int | None:
            return ptr if self._inner.map(ptr, size_bytes) else None

        return _hooked(self._device_id, size_bytes, take, self._inner.unmap) is not None

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._inner.unmap(ptr, size_bytes)


def _hooked(
    device_id: int,
    size_bytes: int,
    take: Callable[[], int | None],
    give_back: Callable[[int, int], None],
) -> int | None:
    """What `take` returns, with the hooks of the thread around it."""
    hooks = hooks_of_thread()()
    if not hooks:
        return take()
    facts = {"device_id": device_id, "mem_size": size_bytes}
    ptr, told = None, False
    call_hooks(hooks, "alloc_preprocess", **facts)
    try:
        ptr = take()
    finally:
        try:
            call_hooks(hooks, "alloc_postprocess", mem_ptr=ptr or 0, **facts)
            told = True
        finally:
            if ptr is not None and not told:
                give_back(ptr, size_bytes)  # nobody else knows of it
    return ptr


@final
class CupyPool:
    """A CuPy memory pool: pass `pool.malloc` to `cupy.cuda.set_allocator`, or use `install`.

    config: of each device's allocator; None means `AllocatorConfig.from_env()`.
    backend: None means CUDA. Methods without a device act on the current one, as CuPy's pool does.
    plan: a `LifetimePlan` of a recorded step, that each device's allocator follows; say by
        `begin_step` where the steps begin. None: none.
    share: "arena" takes blocks from the memory that `gpu_alloc.torch` serves torch from, under the
        same settings; "torch" from torch's caching allocator, under torch's; None from neither.
    """

    def __init__(
        self,
        config: AllocatorConfig | None = None,
        *,
        backend: CupyBackend | None = None,
        share: Share = None,
        plan: LifetimePlan | None = None,
    ) -> None:
        check_share(share)
        self._share = share
        self.config = AllocatorConfig.from_env() if config is None else config
        check_kind(self.config, AllocatorConfig, "config must be an AllocatorConfig")
        check_plan(plan, self.config.alignment_size)
        if plan is not None and share == "torch":
            raise AllocValueError(
                "torch's caching allocator follows no plan; give share='arena', or no share"
            )
        self._plan = plan
        self._backend = CudaBackend() if backend is None else backend
        self._allocators: dict[int, PoolAllocator] = {}
        self._lock = threading.Lock()
        self._memory = import_cupy().cuda.memory
        # What every allocation calls, looked up once.
        self._hooks, self._where = hooks_of_thread(), self._backend.where
        self._block, self._native_block = block_classes()
        self._pointer = self._memory.MemoryPointer
        self._slack, self._padded = self.config.alignment_size - 1, -self.config.alignment_size
        self._quick: dict[int, tuple[Callable[[int, int], int], NativeAllocator]] = {}
        warn_of_cuda_versions()

    def malloc(self, size: int) -> Any:
        """Allocate `size` bytes on the current device and stream; returns a
        `cupy.cuda.MemoryPointer`.

        Zero bytes give a null pointer. Raises an `OutOfMemoryError` that is also CuPy's.
        """
        device_id, stream = self._where()
        hooks = self._hooks()
        if not hooks and device_id in self._quick and type(size) is int:
            try_malloc, allocator = self._quick[device_id]
            ptr = try_malloc(size, stream)
            if ptr > 0:
                memory = self._native_block(ptr, size + self._slack & self._padded, None, device_id)
                memory.allocator = allocator
                return self._pointer(memory, 0)
        return self._malloc_slowly(size, device_id, stream, hooks)

    def _malloc_slowly(self, size: int, device_id: int, stream: int, hooks: Hooks) -> Any:
        """What needs more than a block that is there: other memory, hooks or an error."""
        allocator = self.allocator(device_id)
        if not hooks:
            return self._allocate(allocator, device_id, stream, size)
        padded = round_up(size, self.config.alignment_size)
        pointer: Any = None
        call_hooks(hooks, "malloc_preprocess", device_id=device_id, size=size, mem_size=padded)
        try:
            pointer = self._allocate(allocator, device_id, stream, size)
        finally:
            is_block = pointer is not None and pointer.ptr
            call_hooks(
                hooks,
                "malloc_postprocess",
                device_id=device_id,
                size=size,
                mem_size=padded,
                mem_ptr=pointer.ptr if is_block else 0,
                pmem_id=id(pointer.mem) if is_block else 0,
            )
        return pointer

    def allocator(self, device_id: int | None = None) -> PoolAllocator:
        """The allocator of a device (None: the current one), made at first use on that device."""
        device = self._backend.device_id() if device_id is None else device_id
        found = self._allocators.get(device)
        if found is None:
            with self._lock:
                found = self._allocators.get(device)
                if found is None:
                    found = self._allocators[device] = self._new_allocator(device)
                    if isinstance(found, NativeAllocator):
                        self._quick[device] = found.try_malloc, found
        return found

    def begin_step(self) -> None:
        """Say that the program is where the step that was planned began, on the current device.

        Raises AllocValueError when the pool has no plan.
        """
        self._planned().begin_step()

    def plan_use(self) -> PlanUse:
        """How many requests of the current device went where the plan said, and how many elsewhere.

        Raises AllocValueError when the pool has no plan.
        """
        return self._planned().plan_use()

    def _planned(self) -> NativeAllocator | TwoPoolAllocator:
        allocator = self.allocator()
        if self._plan is None or not isinstance(allocator, NativeAllocator | TwoPoolAllocator):
            raise AllocValueError("the pool follows no plan; give it one: use(plan=...)")
        return allocator

    def stats(self) -> Stats:
        """Counters of the current device's allocator."""
        return self.allocator().stats()

    def stats_of_devices(self) -> dict[int, Stats]:
        """Counters of each device whose memory the pool was asked for."""
        return {device: allocator.stats() for device, allocator in dict(self._allocators).items()}

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give the current device's idle chunks back to CUDA; pre-allocated ones stay.

        stream: a `cupy.cuda.Stream`: only chunks that no other stream has used.
        """
        name = None if stream is None else self._backend.name_of(stream)
        self.allocator().release_idle(stream=name)

    def record_stream(self, array: Any, stream: Any) -> None:
        """Say that work on `stream` (a `cupy.cuda.Stream`) uses `array`, which was made for
        another: its memory is reused only after what is queued on `stream` when it dies.

        array: a `cupy.ndarray` or `MemoryPointer` of this pool. A per-thread default stream is
        named in its own thread. Raises as `TwoPoolAllocator.record_stream` does.
        """
        memory = getattr(array, "data", array).mem
        name = self._backend.name_of(stream)
        if self._share and name < 0:
            raise AllocValueError(
                "a per-thread default stream cannot be recorded in memory that is shared with "
                "torch; use a stream of its own for the thread"
            )
        self.allocator(memory.device_id).record_stream(int(memory.ptr), name)

    def free_all_free(self) -> None:
        """As `free_all_blocks`, under the name that CuPy keeps for old programs."""
        self.free_all_blocks()

    def used_bytes(self) -> int:
        """Bytes of blocks in use."""
        return self.stats().allocated_bytes

    def free_bytes(self) -> int:
        """Bytes held and not in use."""
        return self.stats().free_bytes

    def total_bytes(self) -> int:
        """Bytes held from CUDA."""
        return self.stats().reserved_bytes

    def n_free_blocks(self) -> int:
        """Number of free blocks."""
        stats = self.stats()
        return stats.small.num_free_blocks + stats.large.num_free_blocks

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Set the current device's hard limit in bytes, or as a fraction of its memory; 0 is none.

        Raises AllocValueError for both or neither, a negative size or a fraction outside [0, 1].
        """
        if (size is None) == (fraction is None):
            raise AllocValueError(f"set_limit(size={size}, fraction={fraction}): give exactly one")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise AllocValueError(f"fraction={fraction} is outside [0, 1]")
            size = int(fraction * self._backend.total_bytes())
        self.allocator().set_limit(size or 0)

    def get_limit(self) -> int:
        """The current device's hard limit in bytes; 0 is none."""
        return self.allocator().limit_bytes

    def close(self) -> None:
        """Give idle memory back now, and the rest as the arrays that use it die; `malloc` then
        raises. What is shared with torch stays open.
        """
        with self._lock:
            allocators = list(self._allocators.values())
        for allocator in allocators:
            if isinstance(allocator, NativeAllocator | TwoPoolAllocator) and not self._share:
                allocator.close()
            else:
                allocator.release_idle()  # torch goes on with the rest

    def _new_allocator(self, device: int) -> PoolAllocator:
        made: PoolAllocator
        if self._share:
            made = shared_allocator(self._share, self.config, device)
        else:
            source, events = self._source(device), self._backend.events(device)
            try:
                made = own_allocator(source, self.config, events)
            except OutOfMemoryError as error:  # of the pre-allocation
                raise _cupy_oom_class()(error.report) from None
        if self._plan is not None and isinstance(made, NativeAllocator | TwoPoolAllocator):
            try:
                made.follow(self._plan)
            except OutOfMemoryError as error:
                if not self._share:
                    made.close()  # with its pre-allocation
                raise _cupy_oom_class()(error.report) from None
        return made

    def _source(self, device: int) -> ChunkSource:
        if self.config.use_virtual_memory:
            return _HookedPages(self._backend.paged_source(device), device)
        return _HookedSource(self._backend.source(device), device)

    def _allocate(self, allocator: PoolAllocator, device_id: int, stream: int, size: int) -> Any:
        try:
            ptr, padded = allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            raise _cupy_oom_class()(error.report) from None
        if ptr:
            memory = self._block(ptr, padded, None, device_id)
            memory.allocator = allocator
        else:
            memory = self._memory.UnownedMemory(0, 0, None, device_id)
        return self._pointer(memory, 0)


@cache
def _cupy_oom_class() -> type[OutOfMemoryError]:
    """Our error that is CuPy's too, so that code written for CuPy catches it."""
    return type(
        "CupyOutOfMemoryError",
        (OutOfMemoryError, import_cupy().cuda.memory.OutOfMemoryError),
        {"__module__": __name__, "__doc__": "Out of memory in a CupyPool."},
    )

"""CuPy's memory served by `TwoPoolAllocator`, through CuPy's public `set_allocator`.

One allocator per device. A block belongs to the stream that was current when it was allocated and
returns to that stream's free list whatever stream is current when it is freed, so reuse is ordered
by the stream itself. As with CuPy's own pool, an array used on a second stream must be kept alive
(or the streams synchronised) until that work is done. CuPy's memory hooks, which CuPy calls only
for its own pool, are called here in the same order.

Importing this module imports no cupy; `install` and `CupyPool` do. Invariant: a block is freed
exactly once, when the last array on it dies, also during garbage collection inside an allocation
and at interpreter exit.

    from gpu_alloc import AllocatorConfig
    from gpu_alloc.cupy import install, uninstall

    pool = install(AllocatorConfig(large_pool_pre_alloc_in_mb=1024))
    ...                               # cupy arrays now live in the pool
    print(pool.stats().reserved_peak_bytes)
    uninstall()                       # arrays that are still alive stay valid
"""

import os
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, final

from gpu_alloc.core import AllocatorConfig, OutOfMemoryError, Stats, TwoPoolAllocator
from gpu_alloc.cupy.backend import CudaBackend, CupyBackend
from gpu_alloc.errors import (
    AllocError,
    AllocValueError,
    CudaVersionWarning,
    check_kind,
)
from gpu_alloc.sources import ChunkSource, import_cupy, round_up


@final
class _HookedSource(ChunkSource):
    """Calls CuPy's `alloc_*` hooks around what really comes from the device."""

    def __init__(self, inner: ChunkSource, device_id: int) -> None:
        self.alignment_bytes = inner.alignment_bytes
        self.granularity_bytes = inner.granularity_bytes
        self._inner = inner
        self._device_id = device_id

    def acquire(self, size_bytes: int) -> int | None:
        hooks = _hooks()
        if not hooks:
            return self._inner.acquire(size_bytes)
        facts = {"device_id": self._device_id, "mem_size": size_bytes}
        ptr, told = None, False
        _call(hooks, "alloc_preprocess", **facts)
        try:
            ptr = self._inner.acquire(size_bytes)
        finally:
            try:
                _call(hooks, "alloc_postprocess", mem_ptr=ptr or 0, **facts)
                told = True
            finally:
                if ptr is not None and not told:
                    self._inner.release(ptr, size_bytes)  # nobody else knows of it
        return ptr

    def release(self, ptr: int, size_bytes: int) -> None:
        self._inner.release(ptr, size_bytes)


@final
class _Lease:
    """Owned by CuPy's memory object; its end frees the block."""

    __slots__ = ("_allocator", "_device_id", "_ptr", "_size")

    def __init__(self, allocator: TwoPoolAllocator, device_id: int, ptr: int, size: int) -> None:
        self._allocator = allocator
        self._device_id = device_id
        self._ptr = ptr
        self._size = size

    def __del__(self) -> None:
        # At interpreter exit the process's memory goes as a whole, and CUDA may already be gone.
        if sys is None or sys.is_finalizing():
            return
        hooks = _hooks()
        if not hooks:
            self._allocator.free(self._ptr)
            return
        facts = {
            "device_id": self._device_id,
            "mem_size": self._size,
            "mem_ptr": self._ptr,
            "pmem_id": id(self),
        }
        try:
            _call(hooks, "free_preprocess", **facts)
        finally:
            try:
                self._allocator.free(self._ptr)
            finally:
                _call(hooks, "free_postprocess", **facts)


@final
class CupyPool:
    """A CuPy memory pool: pass `pool.malloc` to `cupy.cuda.set_allocator`, or use `install`.

    config: of each device's allocator; None means `AllocatorConfig.from_env()`.
    backend: None means CUDA. Methods without a device act on the current one, as CuPy's pool does.
    """

    def __init__(
        self, config: AllocatorConfig | None = None, *, backend: CupyBackend | None = None
    ) -> None:
        self.config = AllocatorConfig.from_env() if config is None else config
        check_kind(self.config, AllocatorConfig, "config must be an AllocatorConfig")
        self._backend = CudaBackend() if backend is None else backend
        self._allocators: dict[int, TwoPoolAllocator] = {}
        self._lock = threading.Lock()
        self._memory = import_cupy().cuda.memory
        _warn_of_cuda_versions()

    def malloc(self, size: int) -> Any:
        """Allocate `size` bytes on the current device and stream; returns a
        `cupy.cuda.MemoryPointer`.

        Zero bytes give a null pointer. Raises an `OutOfMemoryError` that is also CuPy's.
        """
        device_id = self._backend.device_id()
        allocator = self.allocator(device_id)
        hooks = _hooks()
        if not hooks:
            return self._allocate(allocator, device_id, size)[0]
        padded = round_up(size, self.config.alignment_size)
        pointer = None
        ptr = lease_id = 0
        _call(hooks, "malloc_preprocess", device_id=device_id, size=size, mem_size=padded)
        try:
            pointer, ptr, lease_id = self._allocate(allocator, device_id, size)
        finally:
            _call(
                hooks,
                "malloc_postprocess",
                device_id=device_id,
                size=size,
                mem_size=padded,
                mem_ptr=ptr,
                pmem_id=lease_id,
            )
        return pointer

    def allocator(self, device_id: int | None = None) -> TwoPoolAllocator:
        """The allocator of a device (None: the current one), made at first use on that device."""
        device = self._backend.device_id() if device_id is None else device_id
        found = self._allocators.get(device)
        if found is None:
            with self._lock:
                found = self._allocators.get(device)
                if found is None:
                    source = _HookedSource(self._backend.source(device), device)
                    found = self._allocators[device] = TwoPoolAllocator(
                        source, self.config, events=self._backend.events(device)
                    )
        return found

    def stats(self) -> Stats:
        """Counters of the current device's allocator."""
        return self.allocator().stats()

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
        allocator = self.allocator(memory.device_id)
        allocator.record_stream(int(memory.ptr), self._backend.name_of(stream))

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
        raises.
        """
        with self._lock:
            allocators = list(self._allocators.values())
        for allocator in allocators:
            allocator.close()

    def _allocate(
        self, allocator: TwoPoolAllocator, device_id: int, size: int
    ) -> tuple[Any, int, int]:
        try:
            ptr, padded = allocator.malloc(size, self._backend.stream())
        except OutOfMemoryError as error:
            raise _cupy_oom_class()(error.report) from None
        lease = _Lease(allocator, device_id, ptr, padded) if ptr else None
        memory = self._memory.UnownedMemory(ptr, padded, lease, device_id)
        return self._memory.MemoryPointer(memory, 0), ptr, id(lease) if ptr else 0


class _Installed(NamedTuple):
    """What `install` set, and what it replaced, so that `uninstall` can put that back."""

    pool: CupyPool
    allocator: object
    previous: object


@final
class _Installation:
    """Whether a pool of this module is CuPy's allocator, of which a process has one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: _Installed | None = None


_INSTALLATION = _Installation()


def install(
    config: AllocatorConfig | None = None, *, backend: CupyBackend | None = None
) -> CupyPool:
    """Make a `CupyPool` CuPy's allocator for all threads, and return it.

    On CUDA, what CuPy's default pool holds idle is given back to the driver first, so that the new
    pool can have it. Raises AllocError when a pool of this module is installed already, and
    ValueError (from CuPy) inside `cupy.cuda.using_allocator`.
    """
    with _INSTALLATION.lock:
        if _INSTALLATION.now is not None:
            raise AllocError("a gpu_alloc pool is installed already; call uninstall() first")
        cupy = import_cupy()
        pool = CupyPool(config, backend=backend)
        if backend is None:
            cupy.get_default_memory_pool().free_all_blocks()
            pool.allocator()  # pre-allocates now, so that what does not fit fails here
        now = _Installed(pool, pool.malloc, cupy.cuda.get_allocator())
        cupy.cuda.set_allocator(now.allocator)
        _INSTALLATION.now = now  # gate: module-state - CuPy has one allocator a process
        return pool


def use(
    config: AllocatorConfig | str | os.PathLike[str] | None = None,
    *,
    backend: CupyBackend | None = None,
) -> CupyPool:
    """`install` with settings, or with the file of settings that `gpu-alloc tune` wrote.

    Raises as `install` and `AllocatorConfig.from_toml` do.
    """
    if isinstance(config, (str, os.PathLike)):
        config = AllocatorConfig.from_toml(config)
    return install(config, backend=backend)


def uninstall() -> None:
    """Put the allocator back that `install` replaced, and close the pool.

    Arrays made meanwhile stay valid; their memory returns to the driver as they die. Raises
    AllocError when nothing is installed, or when someone set another allocator after `install`.
    """
    with _INSTALLATION.lock:
        now = _INSTALLATION.now
        if now is None:
            raise AllocError("no gpu_alloc pool is installed; call install() first")
        cuda = import_cupy().cuda
        if cuda.get_allocator() is not now.allocator:
            raise AllocError(
                "CuPy's allocator was changed after install(); set it back to pool.malloc of the "
                "installed pool before uninstall()"
            )
        cuda.set_allocator(now.previous)
        _INSTALLATION.now = None  # gate: module-state - CuPy has one allocator a process
        now.pool.close()


def cuda_version_problem(cupy_version: int, torch_version: str | None) -> str | None:
    """Why two CUDA builds do not go together, or None.

    cupy_version: as CUDA counts, 12090 for 12.9. torch_version: `torch.version.cuda`, for example
    "13.0"; None for a torch without CUDA.
    """
    cupy_major = cupy_version // 1000
    torch_major = int(torch_version.split(".")[0]) if torch_version else cupy_major
    if cupy_major == torch_major:
        return None
    return (
        f"cupy is built for CUDA {cupy_major} but torch for CUDA {torch_major}; libraries of both "
        f"majors in one process can fail at run time: pip install 'gpu-alloc[cuda{torch_major}]' "
        "and remove the other cupy"
    )


def _warn_of_cuda_versions() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        version = import_cupy().cuda.runtime.runtimeGetVersion()
        problem = cuda_version_problem(version, torch.version.cuda)
        if problem is not None:
            _warn_once(problem)


@cache
def _warn_once(problem: str) -> None:
    warnings.warn(problem, CudaVersionWarning, stacklevel=5)


@cache
def _cupy_oom_class() -> type[OutOfMemoryError]:
    """Our error that is CuPy's too, so that code written for CuPy catches it."""
    return type(
        "CupyOutOfMemoryError",
        (OutOfMemoryError, import_cupy().cuda.memory.OutOfMemoryError),
        {"__module__": __name__, "__doc__": "Out of memory in a CupyPool."},
    )


def _hooks() -> Mapping[str, Any]:
    hooks: Mapping[str, Any] = import_cupy().cuda.memory_hook.get_memory_hooks()
    return hooks


def _call(hooks: Mapping[str, Any], name: str, **facts: int) -> None:
    for hook in hooks.values():
        getattr(hook, name)(**facts)

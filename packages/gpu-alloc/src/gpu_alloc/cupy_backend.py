"""The device side of the CuPy adapter: current device and stream, and `cudaMalloc` as a source.

It stands apart from the pool so that the pool can be run, and tested, on another source of memory.
Importing this module imports no cupy. Invariant: two streams never have the same name, so their
free blocks never mix.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from functools import cache
from importlib import import_module
from typing import Any, final

from gpu_alloc.sources import ChunkSource

_CUDA_ALIGNMENT_BYTES = 512  # what CuPy and torch rely on for cudaMalloc
_CUDA_GRANULARITY_BYTES = 2 << 20  # a physical page; cudaMalloc maps whole ones
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


@cache
def import_cupy() -> Any:
    """The module cupy, imported at the first call. Raises ModuleNotFoundError saying what to
    install.
    """
    try:
        return import_module("cupy")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; gpu_alloc.cupy_memory needs CuPy: pip install 'gpu-alloc[cuda13]' (or "
            "[cuda12])",
            name=error.name,
        ) from None


class CupyBackend(ABC):
    """The device side of a `CupyPool`: where it is, and where chunks come from."""

    @abstractmethod
    def device_id(self) -> int:
        """Index of the current device."""

    @abstractmethod
    def stream(self) -> int:
        """A number that names the current stream of this thread, and no other stream."""

    @abstractmethod
    def source(self, device_id: int) -> ChunkSource:
        """A new source of memory on that device."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the current device in bytes."""


@final
class CudaSource(ChunkSource):
    """`cudaMalloc` and `cudaFree` on one device. `cudaFree` waits for the device, as a release
    must.
    """

    alignment_bytes = _CUDA_ALIGNMENT_BYTES
    granularity_bytes = _CUDA_GRANULARITY_BYTES

    def __init__(self, device_id: int) -> None:
        self._device = import_cupy().cuda.Device(device_id)
        self._runtime = import_cupy().cuda.runtime

    def acquire(self, size_bytes: int) -> int | None:
        """See `ChunkSource.acquire`. CUDA errors other than out-of-memory are raised as CuPy
        does.
        """
        try:
            with self._device:
                return int(self._runtime.malloc(size_bytes))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _CUDA_OUT_OF_MEMORY:
                raise
            return None

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`."""
        with self._device:
            self._runtime.free(ptr)


@final
class CudaBackend(CupyBackend):
    """CuPy's current device and stream."""

    def __init__(self) -> None:
        self._cuda = import_cupy().cuda
        self._per_thread = threading.local()
        self._thread_names = itertools.count(1)

    def device_id(self) -> int:
        """See `CupyBackend.device_id`."""
        return int(self._cuda.runtime.getDevice())

    def stream(self) -> int:
        """See `CupyBackend.stream`. The per-thread default stream gets a negative number per
        thread.
        """
        ptr = int(self._cuda.get_current_stream().ptr)
        if ptr != self._cuda.runtime.streamPerThread:
            return ptr
        names: dict[str, int] = self._per_thread.__dict__
        if "name" not in names:
            names["name"] = -next(self._thread_names)
        return names["name"]

    def source(self, device_id: int) -> ChunkSource:
        """See `CupyBackend.source`."""
        return CudaSource(device_id)

    def total_bytes(self) -> int:
        """See `CupyBackend.total_bytes`."""
        return int(self._cuda.runtime.memGetInfo()[1])

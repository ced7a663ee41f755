"""`cudaMalloc` through CuPy as a source, and the one place that imports cupy.

Importing this module imports no cupy. Invariant: a missing cupy is one error that says what to
install.
"""

from functools import cache
from importlib import import_module
from typing import Any, final

from gpu_alloc.sources.chunk_source import ChunkSource

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

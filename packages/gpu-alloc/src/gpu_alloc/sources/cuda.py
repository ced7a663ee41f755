"""`cudaMalloc` and CUDA events through CuPy, and the one place that imports cupy.

Importing this module imports no cupy. Invariant: a missing cupy is one error that says what to
install.
"""

from functools import cache
from importlib import import_module
from typing import Any, final

from gpu_alloc.sources.chunk_source import ChunkSource
from gpu_alloc.sources.cuda_pages import CudaPagedSource
from gpu_alloc.sources.paged import PagedSource
from gpu_alloc.sources.stream_events import StreamEvents

_CUDA_ALIGNMENT_BYTES = 512  # what CuPy and torch rely on for cudaMalloc
_CUDA_GRANULARITY_BYTES = 2 << 20  # a physical page; cudaMalloc maps whole ones
_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_PER_THREAD_STREAM = 2  # cudaStreamPerThread


@cache
def import_cupy() -> Any:
    """The module cupy, imported at the first call. Raises ModuleNotFoundError saying what to
    install.
    """
    try:
        return import_module("cupy")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; gpu_alloc.cupy needs CuPy: pip install 'gpu-alloc[cuda13]' (or [cuda12])",
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

    @staticmethod
    def in_pages(device_id: int) -> PagedSource:
        """The device's memory in pages that are mapped, for `use_virtual_memory`.

        Raises AllocError where there is no driver, or it cannot map pages on the device.
        """
        return CudaPagedSource(device_id)

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
class CudaEvents(StreamEvents):
    """CUDA events of one device, recorded on streams by their handles."""

    def __init__(self, device_id: int) -> None:
        self._cuda = import_cupy().cuda
        self._device = self._cuda.Device(device_id)
        self._runtime = self._cuda.runtime

    def record(self, stream: int) -> Any:
        """See `StreamEvents.record`; None for a stream that was destroyed.

        Nor has an event a per-thread stream: whoever records it, maybe another thread, has another
        stream of that handle, so the host waits for the device.
        """
        with self._device:
            if stream < 0:
                self._runtime.deviceSynchronize()
                return None
            event = self._cuda.Event(disable_timing=True)
            try:
                self._runtime.eventRecord(event.ptr, _handle(stream))
            except self._runtime.CUDARuntimeError:
                self._runtime.deviceSynchronize()
                return None
            return event

    def is_done(self, event: Any) -> bool:
        """See `StreamEvents.is_done`."""
        return event is None or bool(event.done)

    def wait(self, event: Any) -> None:
        """See `StreamEvents.wait`."""
        if event is not None:
            event.synchronize()

    def is_capturing(self, stream: int) -> bool:
        """See `StreamEvents.is_capturing`."""
        current = int(self._cuda.get_current_stream().ptr)
        try:
            return any(self._runtime.streamIsCapturing(s) for s in {_handle(stream), current})
        except self._runtime.CUDARuntimeError:
            return False  # destroyed: no capture is in progress on it


def _handle(stream: int) -> int:
    """CUDA's handle of a stream as the pool names it: negative names are per-thread streams."""
    return stream if stream >= 0 else _PER_THREAD_STREAM

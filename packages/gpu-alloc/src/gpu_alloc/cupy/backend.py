"""The device side of the CuPy adapter: current device and stream, and where chunks come from.

It stands apart from the pool so that the pool can be run, and tested, on another source of memory.
Importing this module imports no cupy. Invariant: two streams never have the same name, so their
free blocks never mix.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from typing import Any, final

from gpu_alloc.errors import AllocValueError
from gpu_alloc.sources import (
    ChunkSource,
    CudaEvents,
    CudaSource,
    HostSource,
    PagedHostSource,
    PagedSource,
    StreamEvents,
    import_cupy,
)


class CupyBackend(ABC):
    """The device side of a `CupyPool`: where it is, and where chunks come from."""

    @abstractmethod
    def device_id(self) -> int:
        """Index of the current device."""

    @abstractmethod
    def stream(self) -> int:
        """A number that names the current stream of this thread, and no other stream."""

    def where(self) -> tuple[int, int]:
        """The current device and the number of the current stream, asked at every allocation."""
        return self.device_id(), self.stream()

    def name_of(self, stream: Any) -> int:
        """The number that names a `cupy.cuda.Stream`, as `stream` gives it for the current one."""
        return int(stream.ptr)

    @abstractmethod
    def source(self, device_id: int) -> ChunkSource:
        """A new source of memory on that device."""

    def paged_source(self, device_id: int) -> PagedSource:
        """A new source of pages on that device, for settings with `use_virtual_memory`.

        Raises AllocValueError where there is none, AllocError where the device has no pages.
        """
        raise AllocValueError(
            f"{type(self).__name__} has no source of pages (paged_source); set use_virtual_memory "
            "to False"
        )

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the current device in bytes."""

    def events(self, device_id: int) -> StreamEvents | None:
        """Events of that device, for `record_stream`; None: it has none."""
        return None


@final
class CudaBackend(CupyBackend):
    """CuPy's current device and stream."""

    def __init__(self) -> None:
        self._cuda = import_cupy().cuda
        self._get_device = self._cuda.runtime.getDevice
        self._get_stream = self._cuda.get_current_stream
        self._of_each_thread = self._cuda.runtime.streamPerThread
        self._per_thread = threading.local()
        self._thread_names = itertools.count(1)

    def device_id(self) -> int:
        """See `CupyBackend.device_id`."""
        return int(self._get_device())

    def stream(self) -> int:
        """See `CupyBackend.stream`. The per-thread default stream gets a negative number per
        thread.
        """
        return self.name_of(self._get_stream())

    def where(self) -> tuple[int, int]:
        """See `CupyBackend.where`."""
        device_id = self._get_device()
        ptr = self._get_stream(device_id).ptr
        return device_id, self._name_of_thread() if ptr == self._of_each_thread else ptr

    def name_of(self, stream: Any) -> int:
        """See `CupyBackend.name_of`."""
        ptr = int(stream.ptr)
        return self._name_of_thread() if ptr == self._of_each_thread else ptr

    def _name_of_thread(self) -> int:
        names: dict[str, int] = self._per_thread.__dict__
        if "name" not in names:
            names["name"] = -next(self._thread_names)
        return names["name"]

    def source(self, device_id: int) -> ChunkSource:
        """See `CupyBackend.source`."""
        return CudaSource(device_id)

    def paged_source(self, device_id: int) -> PagedSource:
        """See `CupyBackend.paged_source`."""
        return CudaSource.in_pages(device_id)

    def total_bytes(self) -> int:
        """See `CupyBackend.total_bytes`."""
        return int(self._cuda.runtime.memGetInfo()[1])

    def events(self, device_id: int) -> StreamEvents:
        """See `CupyBackend.events`."""
        return CudaEvents(device_id)


@final
class HostBackend(CupyBackend):
    """A pretended device whose memory is the host's, to run a program's allocations without a GPU.

    `cupy.ndarray(shape, dtype)` then works, kernels and copies do not; `source_of_host.view` reads
    and writes the bytes. The current stream is what `current_stream` was set to. Chunks are of
    whole pages of a device, so that settings found for a device fit here as they do there.
    capacity_bytes: None leaves it to the operating system.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.source_of_host: HostSource | PagedHostSource = HostSource(
            capacity_bytes, granularity_bytes=CudaSource.granularity_bytes
        )
        self.current_stream = 0

    def device_id(self) -> int:
        """See `CupyBackend.device_id`."""
        return 0

    def stream(self) -> int:
        """See `CupyBackend.stream`."""
        return self.current_stream

    def where(self) -> tuple[int, int]:
        """See `CupyBackend.where`."""
        return 0, self.current_stream

    def source(self, device_id: int) -> ChunkSource:
        """See `CupyBackend.source`."""
        return self.source_of_host

    def paged_source(self, device_id: int) -> PagedSource:
        """See `CupyBackend.paged_source`. `source_of_host` is these pages from then on."""
        pages = PagedHostSource(self.source_of_host.capacity_bytes)
        self.source_of_host = pages
        return pages

    def total_bytes(self) -> int:
        """See `CupyBackend.total_bytes`; 0 when there is no limit."""
        return self.source_of_host.capacity_bytes or 0

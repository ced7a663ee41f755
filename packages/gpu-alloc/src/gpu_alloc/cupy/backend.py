"""The device side of the CuPy adapter: current device and stream, and where chunks come from.

It stands apart from the pool so that the pool can be run, and tested, on another source of memory.
Importing this module imports no cupy. Invariant: two streams never have the same name, so their
free blocks never mix.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from typing import Any, final

from gpu_alloc.sources import ChunkSource, CudaSource, import_cupy


class CupyBackend(ABC):
    """The device side of a `CupyPool`: where it is, and where chunks come from."""

    @abstractmethod
    def device_id(self) -> int:
        """Index of the current device."""

    @abstractmethod
    def stream(self) -> int:
        """A number that names the current stream of this thread, and no other stream."""

    def name_of(self, stream: Any) -> int:
        """The number that names a `cupy.cuda.Stream`, as `stream` gives it for the current one."""
        return int(stream.ptr)

    @abstractmethod
    def source(self, device_id: int) -> ChunkSource:
        """A new source of memory on that device."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the current device in bytes."""


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
        return self.name_of(self._cuda.get_current_stream())

    def name_of(self, stream: Any) -> int:
        """See `CupyBackend.name_of`."""
        ptr = int(stream.ptr)
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

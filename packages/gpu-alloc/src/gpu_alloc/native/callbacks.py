"""A source and events that are Python's, as functions in the shape of CUDA's.

An exception cannot cross C. It is kept, the core is told that the call failed, and whoever called
the core raises it afterwards.

Invariant: an exception of a callback is raised once, by the thread in which it happened.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from gpu_alloc.sources import ChunkSource, PagedSource, StreamEvents

_OUT_OF_MEMORY, _NOT_READY, _FAILED = 2, 600, 999  # cudaError_t

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_OF_PAGES = ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_size_t)
_PLACE_OF_MAP = 13  # in the struct `Functions`
_TO_POINTER, _TO_INT = ctypes.POINTER(_POINTER), ctypes.POINTER(_INT)


@final
class Kept:
    """A context that keeps an exception for this thread instead of letting it on."""

    def __init__(self) -> None:
        self.any = False
        self._threads = threading.local()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and getattr(self._threads, "error", None) is None:
            self._threads.error = error
            self.any = True
        return True

    def raise_kept(self) -> None:
        """Raise what was kept in this thread, if anything."""
        error: BaseException | None = getattr(self._threads, "error", None)
        if error is not None:
            self._threads.error = None
            raise error


NOTHING_KEPT = Kept()  # of a core that calls no Python


@final
class Callbacks:
    """The functions of one source and, where there are any, of its events.

    `pointers` are their addresses in the order of core.cpp; they are valid while this object lives.
    """

    def __init__(self, source: ChunkSource, events: StreamEvents | None) -> None:
        self.kept = Kept()
        self._source = source
        self._sizes: dict[int, int] = {}
        self._events: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        shapes: list[tuple[Callable[..., int], tuple[Any, ...]]]
        shapes = [(self._acquire, (_TO_POINTER, ctypes.c_size_t)), (self._release, (_POINTER,))]
        if events is not None:
            self._stream_events = events
            shapes += [
                (self._create, (_TO_POINTER, ctypes.c_uint)),
                (self._record, (_POINTER, _POINTER)),
                (self._query, (_POINTER,)),
                (self._wait, (_POINTER,)),
                (self._destroy, (_POINTER,)),
                (self._is_capturing, (_POINTER, _TO_INT)),
                (self._device_wait, ()),
            ]
        self._functions: list[Any] = [ctypes.CFUNCTYPE(_INT, *shape)(f) for f, shape in shapes]
        self.pointers = [ctypes.cast(f, _POINTER).value for f in self._functions]
        if isinstance(source, PagedSource):
            self._pages = source
            paged = [_OF_PAGES(self._map), _OF_PAGES(self._unmap)]
            self._functions += paged
            self.pointers += [None] * (_PLACE_OF_MAP - len(self.pointers))
            self.pointers += [ctypes.cast(f, _POINTER).value for f in paged]

    def _acquire(self, out: Any, size_bytes: int) -> int:
        with self.kept:
            ptr = self._source.acquire(size_bytes)
            if ptr is None:
                return _OUT_OF_MEMORY
            self._sizes[ptr] = size_bytes
            out[0] = ptr
            return 0
        return _FAILED

    def _release(self, ptr: int) -> int:
        with self.kept:
            self._source.release(ptr, self._sizes.pop(ptr))
            return 0
        return _FAILED

    def _map(self, ptr: int, size_bytes: int) -> int:
        with self.kept:
            return 0 if self._pages.map(ptr, size_bytes) else _OUT_OF_MEMORY
        return _FAILED

    def _unmap(self, ptr: int, size_bytes: int) -> int:
        with self.kept:
            self._pages.unmap(ptr, size_bytes)
            return 0
        return _FAILED

    def _create(self, out: Any, flags: int) -> int:
        out[0] = next(self._numbers)
        return 0

    def _record(self, number: int, stream: int | None) -> int:
        with self.kept:
            self._events[number] = self._stream_events.record(_signed(stream))
            return 0
        return _FAILED

    def _query(self, number: int) -> int:
        with self.kept:
            return 0 if self._stream_events.is_done(self._events[number]) else _NOT_READY
        return _FAILED

    def _wait(self, number: int) -> int:
        with self.kept:
            self._stream_events.wait(self._events[number])
            return 0
        return _FAILED

    def _destroy(self, number: int) -> int:
        self._events.pop(number, None)
        return 0

    def _is_capturing(self, stream: int | None, out: Any) -> int:
        with self.kept:
            out[0] = int(self._stream_events.is_capturing(_signed(stream)))
            return 0
        return _FAILED

    def _device_wait(self) -> int:
        return _FAILED  # an event was not recorded, and nobody has waited for its work


def _signed(stream: int | None) -> int:
    """A stream's name, which C took for an address: names may be negative, and 0 is None there."""
    number = stream or 0
    return number - (1 << 64) if number >> 63 else number

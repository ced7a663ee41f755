"""A CuPy memory hook that records a program's allocations as a trace, and changes nothing else.

CuPy calls hooks for its own pool, and ours calls them with the same arguments, so either is
recorded. A hook belongs to the thread that entered it; `all_threads` also enters it in every thread
that is started meanwhile (`new_threads.py`). Threads that ran before enter the hook themselves.

Invariant: each block of a trace is allocated once and freed at most once, and only blocks that were
allocated while recording are freed.

    with TraceHook() as hook:
        train()
    save_trace(hook.events, "trace.jsonl")
"""

import os
import sys
import threading
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Self

from gpu_alloc.cupy.backend import CudaBackend, CupyBackend
from gpu_alloc.errors import AllocValueError
from gpu_alloc.events import TraceEvent
from gpu_alloc.new_threads import in_new_threads
from gpu_alloc.sources import import_cupy

_OURS = str(Path(__file__).parents[1]) + os.sep


class TraceHook:
    """A `cupy.cuda.MemoryHook` that keeps what it sees as `TraceEvent`s, with streams, threads and
    the line that asked.

    all_threads: enter it in threads that start while it is in force, too.
    backend: tells the current stream; None means CUDA. The one that was given to `use` or `install`
        is right for a program that runs without a GPU.
    """

    name = "gpu_alloc.TraceHook"

    def __new__(
        cls, *, all_threads: bool = False, backend: CupyBackend | None = None
    ) -> "TraceHook":
        """The class proper has CuPy's hook as a base, and is made once cupy is needed."""
        return super().__new__(_hook_class())

    def __init__(self, *, all_threads: bool = False, backend: CupyBackend | None = None) -> None:
        self._backend = CudaBackend() if backend is None else backend
        self._all_threads = all_threads
        self._new_threads = ExitStack()
        self._live: dict[tuple[int, int], int] = {}
        self._numbers = count(1)
        self._threads: dict[int, int] = {}
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self._recording = False
        self._marks: list[TraceEvent] = []
        self.traces: dict[int, list[TraceEvent]] = {}

    @property
    def events(self) -> list[TraceEvent]:
        """The trace, when there is one: AllocValueError says which devices have one otherwise."""
        if len(self.traces) > 1:
            raise AllocValueError(
                f"devices {sorted(self.traces)} were used; take traces[device] of one of them"
            )
        return next(iter(self.traces.values()), [])

    def mark(self, name: str) -> None:
        """Put a name, such as that of a step or phase, into every trace; those that begin later
        begin with it.
        """
        mark = TraceEvent(action="mark", note=name, thread=self._thread())
        with self._lock:
            self._marks.append(mark)
            for events in self.traces.values():
                events.append(mark)

    def __enter__(self) -> Self:
        """Record from here on in this thread. Raises KeyError, as CuPy does, when it is entered."""
        _cupys_hook().__enter__(self)
        if not self._recording:
            self._recording = True
            if self._all_threads:
                self._new_threads.enter_context(in_new_threads(self._enter_thread))
        return self

    def __exit__(self, *error: object) -> None:
        """End the recording, in all threads."""
        self._recording = False
        self._new_threads.close()
        _cupys_hook().__exit__(self, *error)

    def malloc_postprocess(self, **facts: int) -> None:
        """CuPy's call after a block was handed out, or after that failed."""
        if not self._recording or not facts["size"]:
            return
        number = next(self._numbers)
        events = self.traces.get(facts["device_id"])
        if events is None:
            with self._lock:
                events = self.traces.setdefault(facts["device_id"], list(self._marks))
        where: dict[str, Any] = {
            "block_id": number,
            "stream": self._backend.stream(),
            "thread": self._thread(),
        }
        note = _line_of(sys._getframe(1))
        events.append(TraceEvent(action="alloc", size_bytes=facts["size"], note=note, **where))
        if facts["mem_ptr"]:
            self._live[facts["device_id"], facts["pmem_id"]] = number
        else:  # it failed: taken and given back, so that a replay makes the request too
            events.append(TraceEvent(action="free", **where))

    def free_preprocess(self, **facts: int) -> None:
        """CuPy's call before a block goes back, after which another may get it."""
        number = self._live.pop((facts["device_id"], facts["pmem_id"]), None)
        if number is not None and self._recording:
            events = self.traces[facts["device_id"]]
            events.append(TraceEvent(action="free", block_id=number, thread=self._thread()))

    def _thread(self) -> int:
        ident = threading.get_ident()
        if ident not in self._threads:
            with self._lock:
                self._threads.setdefault(ident, len(self._threads))
        return self._threads[ident]

    def _enter_thread(self) -> None:
        if self._recording:
            _cupys_hook().__enter__(self)


def _cupys_hook() -> Any:
    return import_cupy().cuda.MemoryHook


@cache
def _hook_class() -> type[TraceHook]:
    return type("TraceHook", (TraceHook, _cupys_hook()), {"__doc__": TraceHook.__doc__})


@cache
def _folders() -> tuple[str, ...]:
    return (_OURS, str(Path(import_cupy().__file__).parent) + os.sep)


def _line_of(frame: FrameType | None) -> str:
    """`file.py:12` of the first caller that is neither CuPy nor this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_folders()):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Record which storages a torch program allocates and frees, as a trace that replays anywhere.

Works on any device, on fake tensors too, and without CUDA: every operator's outputs are looked at,
and a storage counts as freed when torch drops it. Sizes are those of storages, so narrow and packed
types (fp8, fp4, int4) are right. Memory that an operator takes and returns inside itself is not
seen, nor is what lives outside tensors.

Invariant: each storage of a trace is allocated once and freed at most once.

    with TraceRecorder() as recorder:
        with recorder.phase("forward"):
            loss = model(batch)
        loss.backward()
    replay(recorder.events, AllocatorConfig())
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import FrameType
from typing import Any, Self, final

from gpu_alloc.errors import AllocValueError
from gpu_alloc.events import TraceEvent
from gpu_alloc.torch._torch_private import OutputsMode, storage_id, torch


@final
class TraceRecorder:
    """A context that keeps what torch allocates in this thread and in its backward passes.

    device: a device or type of device, such as "cuda"; None records all, as one memory.
    labels: by the name of a module or package, what is noted of the allocations that it, or what it
        calls, makes: {"torch.optim": "optimizer"}. Of several the one that is called last counts.
    `events` is the trace so far. A recorder is entered once.
    """

    def __init__(
        self,
        *,
        device: str | torch.device | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._live: dict[int, weakref.finalize[Any, torch.UntypedStorage]] = {}
        self._labels = dict(labels or {})
        self._places: dict[int, int] = {}  # of each live storage's allocation in the trace
        self._blocks = count()
        self._mode = OutputsMode(self._saw)
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self._entered = False
        self.events: list[TraceEvent] = []

    def __enter__(self) -> Self:
        """Record from here on. Raises AllocValueError when entered a second time."""
        if self._entered:
            raise AllocValueError("a TraceRecorder is entered once; make another for another trace")
        self._entered = True
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's class has no types
        return self

    def __exit__(self, *error: Any) -> None:
        """End the trace; what is live stays live in it."""
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        with self._lock:
            for finalizer in self._live.values():
                finalizer.detach()
            self._live.clear()

    def mark(self, name: str) -> None:
        """Put a name into the trace, such as that of a step."""
        with self._lock:
            self.events.append(TraceEvent(action="mark", note=name))

    def failed(self, size_bytes: int, stream: int = 0) -> None:
        """Note a request that found no memory, as taken and given back, so that replays make it."""
        with self._lock:
            block = next(self._blocks)
            self.events += (
                TraceEvent(action="alloc", block_id=block, size_bytes=size_bytes, stream=stream),
                TraceEvent(action="free", block_id=block, size_bytes=size_bytes),
            )

    def forget(self, until: str) -> None:
        """Drop what came before the last mark of this name and is over: marks, and storages that
        were freed. Storages that live on stay, so that a long program can be recorded.

        Without such a mark nothing is dropped.
        """
        with self._lock:
            marks = (e.action == "mark" and e.note == until for e in reversed(self.events))
            behind = next((n for n, is_it in enumerate(marks, start=1) if is_it), None)
            if behind is None:
                return
            before = self.events[: len(self.events) - behind]
            freed = {event.block_id for event in before if event.action == "free"}
            kept = [n for n, e in enumerate(before) if e.action == "alloc"]
            kept = [n for n in kept if before[n].block_id not in freed]
            now = {old: new for new, old in enumerate(kept)}
            shorter = len(before) - len(kept)
            self._places = {
                key: now[old] if old < len(before) else old - shorter
                for key, old in self._places.items()
            }
            self.events[: len(before)] = [before[n] for n in kept]

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record storages that were made unseen, by another thread or library, as made now."""
        self._saw(tensors)

    def label(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note of live tensors what they are, whoever made them; those of before are left out."""
        with self._lock:
            for tensor in tensors:
                place = self._places.get(storage_id(tensor))
                if place is not None:
                    self.events[place] = replace(self.events[place], note=name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark where a phase begins and, also when it raises, where it ends (`end of <name>`)."""
        self.mark(name)
        try:
            yield
        finally:
            self.mark(f"end of {name}")

    def _saw(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._device is None or _is_on(tensor.device, self._device):
                self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        key, storage = storage_id(tensor), tensor.untyped_storage()
        size_bytes = storage.nbytes()
        with self._lock:
            if key in self._live or not size_bytes:
                return
            block = next(self._blocks)
            stream = _stream_of(tensor)
            self._places[key] = len(self.events)
            self.events.append(
                TraceEvent(
                    action="alloc",
                    block_id=block,
                    size_bytes=size_bytes,
                    stream=stream,
                    note=_label(self._labels) if self._labels else "",
                )
            )
            self._live[key] = weakref.finalize(storage, self._freed, key, block, size_bytes)
            self._live[key].atexit = False

    def _freed(self, key: int, block: int, size_bytes: int) -> None:
        with self._lock:
            if self._live.pop(key, None) is not None:
                self._places.pop(key, None)
                self.events.append(TraceEvent(action="free", block_id=block, size_bytes=size_bytes))


def _label(labels: Mapping[str, str]) -> str:
    """The label of the innermost function whose module has one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        while module:
            if module in labels:
                return labels[module]
            module = module.rpartition(".")[0]
        frame = frame.f_back
    return ""


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and wanted.index in (None, device.index)


def _stream_of(tensor: torch.Tensor) -> int:
    """The stream that is current on a tensor's device: 0 where there are none, as on fake ones."""
    if tensor.device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)

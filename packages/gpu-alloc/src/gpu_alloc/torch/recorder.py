"""Record which storages a torch program allocates and frees, as a trace that replays anywhere.

Works on any device, on fake tensors too, and without CUDA: every operator's outputs are looked at,
and a storage counts as freed when torch drops it. Sizes are those of storages, so narrow and packed
types (fp8, fp4, int4) are right; a storage that is resized (as FSDP's are) gives its memory back
and takes other. Memory that an operator takes and returns inside itself is not seen, nor is what
lives outside tensors.

A recorder belongs to the thread that entered it; `all_threads` also enters it in every thread that
Python starts meanwhile.

Invariant: each block of a trace is allocated once and freed at most once.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import FrameType
from typing import Any, Self, final

from gpu_alloc.errors import AllocValueError
from gpu_alloc.events import TraceEvent
from gpu_alloc.new_threads import in_new_threads
from gpu_alloc.torch._torch_private import OutputsMode, on_resize, storage_id, tensors_in, torch


@dataclass(slots=True)
class _Held:
    """A live storage: what the trace has of its memory, and what tells that it is gone."""

    block: int
    size_bytes: int  # 0: it has no memory, or has given it back
    device: torch.device
    note: str
    finalizer: "weakref.finalize[Any, torch.UntypedStorage]"


@final
class TraceRecorder:
    """A context that keeps what torch allocates in this thread and in its backward passes.

    device: a device or type of device, such as "cuda"; None records all, as one memory.
    labels: by the name of a module or package, what is noted of the allocations that it, or what it
        calls, makes: {"torch.optim": "optimizer"}. Of several the one that is called last counts.
    all_threads: of threads that start while it is in force, too.
    `events` is the trace so far, `traces()` that of each device. A recorder is entered once.
    """

    def __init__(
        self,
        *,
        device: str | torch.device | None = None,
        labels: Mapping[str, str] | None = None,
        all_threads: bool = False,
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._live: dict[int, _Held] = {}
        self._labels = dict(labels or {})
        self._blocks = count()
        self._devices: dict[int, str] = {}  # of blocks
        self._all_threads = all_threads
        self._contexts = ExitStack()
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self._entered = self._recording = False
        self.events: list[TraceEvent] = []

    def __enter__(self) -> Self:
        """Record from here on. Raises AllocValueError when entered a second time."""
        if self._entered:
            raise AllocValueError("a TraceRecorder is entered once; make another for another trace")
        self._entered = self._recording = True
        self._contexts.enter_context(on_resize(self._saw, self._resized))
        if self._all_threads:
            self._contexts.enter_context(in_new_threads(self._enter_thread))
        self._contexts.enter_context(OutputsMode(self._saw, self._resized))
        return self

    def __exit__(self, *error: Any) -> None:
        """End the trace; what is live stays live in it."""
        self._recording = False
        self._contexts.close()
        with self._lock:
            for held in self._live.values():
                held.finalizer.detach()
            self._live.clear()

    def traces(self) -> dict[str, list[TraceEvent]]:
        """The trace of each device by its name ("cpu", "cuda:0"), with all marks. What `failed`
        noted is of no device known here, and in `events` alone.
        """
        with self._lock:
            found: dict[str, list[TraceEvent]] = {n: [] for n in self._devices.values()}
            for event in self.events:
                if event.action == "mark":
                    for events in found.values():
                        events.append(event)
                elif event.block_id in self._devices:
                    found[self._devices[event.block_id]].append(event)
            return found

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
            for block in freed:
                self._devices.pop(block, None)
            kept = [e for e in before if e.action == "alloc" and e.block_id not in freed]
            self.events[: len(before)] = kept

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record storages that were made unseen, by another thread or library, as made now."""
        self._saw(tensors_in(list(tensors)))

    def label(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note of live tensors what they are, whoever made them; those of before are left out."""
        with self._lock:
            keys = map(storage_id, tensors_in(list(tensors)))
            found = [self._live[key] for key in keys if key in self._live]
            for held in found:
                held.note = name
            blocks = {held.block for held in found if held.size_bytes}
            # Looked for, not remembered: a finalizer may note a free before any allocation.
            for place, event in enumerate(self.events):
                if event.action == "alloc" and event.block_id in blocks:
                    self.events[place] = replace(event, note=name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark where a phase begins and, also when it raises, where it ends (`end of <name>`)."""
        self.mark(name)
        try:
            yield
        finally:
            self.mark(f"end of {name}")

    def _enter_thread(self) -> None:
        if self._recording:  # until the thread ends, for nothing once the recording has
            OutputsMode(self._saw, self._resized).__enter__()  # type: ignore[no-untyped-call]

    def _saw(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._hold(tensor.untyped_storage(), tensor.device)

    def _resized(self, storage: torch.UntypedStorage, in_recorded_thread: bool) -> None:
        """What a storage from before the recording has now is new, too."""
        with self._lock:
            held = self._live.get(storage._cdata)
        if held is not None or in_recorded_thread:
            self._hold(storage, storage.device if held is None else held.device)

    def _hold(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Note what a storage has now: also nothing, since it may be resized later.

        device: the tensor's; the storage of a fake one says that it is on none.
        """
        if not self._recording or not (self._device is None or _is_on(device, self._device)):
            return
        with self._lock:
            key: int = storage._cdata
            held = self._live.get(key)
            if held is None:
                finalizer = weakref.finalize(storage, self._freed, key)
                finalizer.atexit = False
                note = _label(self._labels) if self._labels else ""
                held = _Held(block=0, size_bytes=0, device=device, note=note, finalizer=finalizer)
                self._live[key] = held
            if held.size_bytes != storage.nbytes():
                self._give(held)
                if storage.nbytes():
                    self._take(held, storage.nbytes())

    def _take(self, held: _Held, size_bytes: int) -> None:
        held.block, held.size_bytes = next(self._blocks), size_bytes
        self._devices[held.block] = str(held.device)
        self.events.append(
            TraceEvent(
                action="alloc",
                block_id=held.block,
                size_bytes=size_bytes,
                stream=_stream_of(held.device),
                note=held.note,
            )
        )

    def _give(self, held: _Held) -> None:
        if held.size_bytes:
            block, size_bytes = held.block, held.size_bytes
            held.size_bytes = 0
            self.events.append(TraceEvent(action="free", block_id=block, size_bytes=size_bytes))

    def _freed(self, key: int) -> None:
        with self._lock:
            held = self._live.pop(key, None)
            if held is not None:
                self._give(held)


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


def _stream_of(device: torch.device) -> int:
    """The stream that is current on a device: 0 where there are none, as on that of fake ones."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)

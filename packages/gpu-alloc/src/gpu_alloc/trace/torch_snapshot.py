"""Torch's memory snapshots, read as our traces and written from them, so that each has the other's
tools: `torch.cuda.memory._dump_snapshot` makes a trace for us, torch's viewer shows our placements.

The format is that of `torch.cuda.memory._snapshot()` with the history of `_record_memory_history`;
neither way imports torch. A snapshot is a pickle: only plain values are unpickled, so that a file
from elsewhere can run nothing.

Invariant: a trace that is read frees only what it allocated before; blocks from before the recorded
history are allocated at its beginning.
"""

import os
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from gpu_alloc.core import AllocatorConfig, Snapshot, TwoPoolAllocator
from gpu_alloc.errors import TraceError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.sources import AddressSource, ChunkSource, PagedAddressSource, PagedSource
from gpu_alloc.trace.replaying import apply_event
from gpu_alloc.trace.requests import GRANULARITY_BYTES, nothing_to_reclaim

_IGNORED = frozenset(
    ("free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "snapshot")
)


def read_torch_snapshot(
    snapshot: Mapping[str, Any] | str | os.PathLike[str], *, device: int | None = None
) -> list[TraceEvent]:
    """The trace in a snapshot, or in a file of one, of one device (None: the one that has events).

    A block is freed when torch could use it again (`free_completed`). A request that failed is
    taken and given back at once.

    Raises TraceError for what is no snapshot, one without a history, or several devices with one.
    """
    entries, segments = device_history(snapshot, device)
    reader = _Reader()
    for number, entry in enumerate(entries):
        try:
            reader.read(entry)
        except (KeyError, TypeError) as error:
            raise TraceError(
                f"entry {number} of the history is no allocation: {error!r} in {entry!r}"
            ) from None
    try:
        return reader.trace(_live_blocks(segments))
    except (AttributeError, KeyError, TypeError) as error:
        raise TraceError(f"a segment of the snapshot is none: {error!r}") from None


def device_history(
    snapshot: Mapping[str, Any] | str | os.PathLike[str], device: int | None
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The history of one device in a snapshot, or in a file of one, and its segments at the end.

    Raises as `read_torch_snapshot` does.
    """
    check_kind(snapshot, (Mapping, str, os.PathLike), "snapshot must be a mapping or a path")
    if not isinstance(snapshot, Mapping):
        snapshot = _unpickle(Path(snapshot))
    histories = snapshot.get("device_traces")
    if not isinstance(histories, list) or not all(isinstance(each, list) for each in histories):
        raise TraceError(
            "no device_traces in the snapshot: call torch.cuda.memory._record_memory_history() "
            "before the program, and _dump_snapshot() after it"
        )
    chosen = _device(histories, device)
    try:
        segments = [s for s in snapshot.get("segments", ()) if s["device"] == chosen]
    except (KeyError, TypeError) as error:
        raise TraceError(f"a segment of the snapshot is none: {error!r}") from None
    return histories[chosen], segments


def torch_snapshot(
    trace: Iterable[TraceEvent],
    config: AllocatorConfig | None = None,
    *,
    capacity_bytes: int | None = None,
) -> dict[str, Any]:
    """A snapshot, as torch makes it, of `trace` placed by our pool under `config`.

    Pickle it, or pass it to `torch.cuda._memory_viz.trace_plot`. Raises OutOfMemoryError when the
    trace does not fit, and TraceError for one that contradicts itself.
    """
    history: list[dict[str, Any]] = []
    config = AllocatorConfig.from_env() if config is None else config
    source: _LoggedSource | _LoggedPages
    if config.use_virtual_memory:
        source = _LoggedPages(PagedAddressSource(capacity_bytes), history)
    else:
        device = AddressSource(capacity_bytes, granularity_bytes=GRANULARITY_BYTES)
        source = _LoggedSource(device, history)
    allocator = TwoPoolAllocator(source, config, on_exhausted=nothing_to_reclaim)
    live: dict[int, int] = {}
    sizes: dict[int, TraceEvent] = {}
    for index, event in enumerate(trace):
        if event.action == "free" and live.get(event.block_id):
            ptr, taken = live[event.block_id], sizes[event.block_id]
            for action in ("free_requested", "free_completed"):
                history.append(_entry(action, ptr, taken.size_bytes, taken))
        apply_event(event, index, allocator, live)
        if event.action == "alloc" and live[event.block_id]:
            sizes[event.block_id] = event
            history.append(_entry("alloc", live[event.block_id], event.size_bytes, event))
        elif event.action == "mark":
            history.append(_entry("user_defined", 0, 0, event) | {"user_metadata": event.note})
    for time_us, entry in enumerate(history):
        entry["time_us"] = time_us
    return {
        "segments": list(_segments(allocator.snapshot(), source.held)),
        "device_traces": [list(history)],  # without what the allocator gives back as it ends
        "allocator_settings": {},
        "external_annotations": [],
    }


def save_torch_snapshot(
    trace: Iterable[TraceEvent],
    path: str | os.PathLike[str],
    config: AllocatorConfig | None = None,
) -> None:
    """Write `torch_snapshot(trace, config)` to a file that torch's viewer opens."""
    check_kind(path, (str, os.PathLike), "path must be a str or a Path")
    Path(path).write_bytes(pickle.dumps(torch_snapshot(trace, config)))


# What a pickle with bytes missing or changed makes Python raise.
_OF_DAMAGE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


@final
class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"the file holds a {module}.{name}; a torch snapshot has plain values")


def _unpickle(path: Path) -> Mapping[str, Any]:
    with path.open("rb") as file:
        try:
            value = _PlainUnpickler(file).load()
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from None
        except _OF_DAMAGE as error:
            raise TraceError(f"{path} is no whole pickle: {error!r}") from None
    if not isinstance(value, Mapping):
        raise TraceError(f"{path}: expected a torch snapshot, got a {type(value).__name__}")
    return value


def _device(histories: list[Any], device: int | None) -> int:
    recorded = [number for number, history in enumerate(histories) if history]
    if device is not None and device not in recorded:
        raise TraceError(f"device {device} has no history; devices {recorded} have one")
    if device is None and len(recorded) != 1:
        what = f"devices {recorded} have a history; choose one" if recorded else "no history"
        raise TraceError(
            f"{what}: _record_memory_history() keeps one, and device= or --device chooses"
        )
    return recorded[0] if device is None else device


@final
class _Reader:
    """Entries of a history become events; what was there before comes first."""

    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._before: list[TraceEvent] = []
        self._live: dict[int, int] = {}
        self._number = 0

    def read(self, entry: Mapping[str, Any]) -> None:
        action = entry["action"]
        if action == "alloc":
            self._live[entry["addr"]] = self._alloc(entry, self._events)
        elif action == "free_completed":
            block = self._live.pop(entry["addr"], None)
            if block is None:
                block = self._alloc(entry, self._before)
            self._events.append(TraceEvent(action="free", block_id=block))
        elif action == "oom":
            block = self._alloc(entry, self._events)
            self._events.append(TraceEvent(action="free", block_id=block))
        elif action == "user_defined":
            note = str(entry.get("user_metadata", ""))
            self._events.append(TraceEvent(action="mark", note=note))
        elif action not in _IGNORED:
            raise TraceError(f"action {action!r} of a torch snapshot is unknown to this gpu-alloc")

    def trace(self, blocks: Iterable[Mapping[str, Any]]) -> list[TraceEvent]:
        """All events, with the live blocks of which the history says nothing."""
        for block in blocks:
            if block["addr"] not in self._live:
                self._alloc(block, self._before)
        return self._before + self._events

    def _alloc(self, entry: Mapping[str, Any], events: list[TraceEvent]) -> int:
        self._number += 1
        events.append(
            TraceEvent(
                action="alloc",
                block_id=self._number,
                size_bytes=entry["size"],
                stream=entry["stream"],
                note=_line(entry.get("frames") or ()),
            )
        )
        return self._number


def _live_blocks(segments: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size = block.get("requested_size") or block["size"]
                yield {
                    "addr": block.get("address", address),
                    "size": size,
                    "stream": segment["stream"],
                    "frames": block.get("frames"),
                }
            address += block["size"]


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line that is neither torch's own nor compiled."""
    for frame in frames:
        name = str(frame["filename"])
        if name.endswith(".py") and "/torch/" not in name:
            return f"{name}:{frame['line']}"
    return ""


@final
class _LoggedSource(ChunkSource):
    """Puts each chunk into a history as torch puts segments."""

    def __init__(self, inner: ChunkSource, history: list[dict[str, Any]]) -> None:
        self.alignment_bytes = inner.alignment_bytes
        self.granularity_bytes = inner.granularity_bytes
        self._inner = inner
        self._history = history
        self.held: dict[int, int] = {}  # address -> bytes

    def acquire(self, size_bytes: int) -> int | None:
        ptr = self._inner.acquire(size_bytes)
        if ptr is not None:
            self._history.append(_entry("segment_alloc", ptr, size_bytes, _NO_EVENT))
            self.held[ptr] = size_bytes
        return ptr

    def release(self, ptr: int, size_bytes: int) -> None:
        self._history.append(_entry("segment_free", ptr, size_bytes, _NO_EVENT))
        del self.held[ptr]
        self._inner.release(ptr, size_bytes)


@final
class _LoggedPages(PagedSource):
    """Puts pages into a history as torch puts those of its expandable segments."""

    def __init__(self, inner: PagedSource, history: list[dict[str, Any]]) -> None:
        self._inner = inner
        self._history = history
        self._pages: set[int] = set()

    def acquire(self, size_bytes: int) -> int | None:
        return self._inner.acquire(size_bytes)

    def release(self, ptr: int, size_bytes: int) -> None:
        self._inner.release(ptr, size_bytes)

    def map(self, ptr: int, size_bytes: int) -> bool:
        is_mapped = self._inner.map(ptr, size_bytes)
        if is_mapped:
            self._history.append(_entry("segment_map", ptr, size_bytes, _NO_EVENT))
            self._pages.update(self._pages_of(ptr, size_bytes))
        return is_mapped

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._history.append(_entry("segment_unmap", ptr, size_bytes, _NO_EVENT))
        self._pages.difference_update(self._pages_of(ptr, size_bytes))
        self._inner.unmap(ptr, size_bytes)

    def _pages_of(self, ptr: int, size_bytes: int) -> range:
        return range(ptr, ptr + size_bytes, self.granularity_bytes)

    @property
    def held(self) -> dict[int, int]:
        """Address and bytes of each run of mapped pages."""
        pages = ((page, page + self.granularity_bytes) for page in self._pages)
        return {start: end - start for start, end in merged(pages)}


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses as few ranges (start, end), in order, none of which touches the next."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


_NO_EVENT = TraceEvent(action="mark")


def _entry(action: str, ptr: int, size: int, event: TraceEvent) -> dict[str, Any]:
    file, _, line = event.note.rpartition(":")
    frames = [{"filename": file, "line": int(line), "name": ""}] if line.isdigit() else []
    return {
        "action": action,
        "addr": ptr,
        "size": size,
        "stream": event.stream,
        "frames": frames,
    }


def _segments(snapshot: Snapshot, held: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """A segment of each piece that is `held` (address -> bytes): chunks, or runs of their pages."""
    chunks = sorted(snapshot.chunks, key=lambda chunk: chunk.ptr)
    starts = [chunk.ptr for chunk in chunks]
    for address, size in held.items():
        chunk = chunks[bisect_right(starts, address) - 1]
        end = address + size
        blocks = [b for b in chunk.blocks if b.ptr < end and b.ptr + b.size > address]
        used = [block for block in blocks if not block.is_free]
        yield {
            "device": 0,
            "address": address,
            "total_size": size,
            "stream": 0,
            "segment_type": "small" if chunk.pool == "small" else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": size != chunk.size,
            "allocated_size": sum(block.size for block in used),
            "active_size": sum(block.size for block in used),
            "requested_size": sum(block.requested_bytes for block in used),
            "frames": [],
            "blocks": [
                {
                    "address": max(block.ptr, address),  # of a free one what is held
                    "size": min(block.ptr + block.size, end) - max(block.ptr, address),
                    "requested_size": block.requested_bytes,
                    "state": "inactive" if block.is_free else "active_allocated",
                    "frames": [],
                }
                for block in blocks
            ],
        }

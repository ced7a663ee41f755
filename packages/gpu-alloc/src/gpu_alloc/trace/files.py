"""Files of allocation traces: one event a line, as JSON.

Invariant: `load_trace` returns exactly what `save_trace` was given. The first line names the
format and its version.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpu_alloc.errors import TraceError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.trace.torch_snapshot import read_torch_snapshot

_FORMAT = "gpu-alloc-trace"
_PICKLE = b"\x80"  # how every pickle of protocol 2 and later begins
_VERSION = 2
_READ_VERSIONS = (1, 2)  # 1 had no marks, threads, notes and placements
_DEFAULTS = {f.name: f.default for f in fields(TraceEvent)}
_NEEDED = {"mark": {"action", "note"}}


def save_trace(events: Iterable[TraceEvent], path: str | os.PathLike[str]) -> int:
    """Write the events, one JSON object a line, and return their number. The file appears whole or
    not at all.
    """
    check_kind(events, Iterable, "events must be a sequence of TraceEvents")
    check_kind(path, (str, os.PathLike), "path must be a str or a Path")
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"format": _FORMAT, "version": _VERSION}) + "\n")
            for event in events:
                check_kind(event, TraceEvent, "a trace holds TraceEvents")
                file.write(json.dumps(_record_of(event)) + "\n")
                count += 1
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return count


def load_trace(path: str | os.PathLike[str], *, device: int | None = None) -> list[TraceEvent]:
    """Read a file that `save_trace` wrote, or a snapshot that torch dumped (one `device`'s; see
    `read_torch_snapshot`). Raises TraceError naming file and line for whatever is not a trace, and
    for a trace that is asked for a device, of which it says nothing.
    """
    check_kind(path, (str, os.PathLike), "path must be a str or a Path")
    if is_torch_snapshot(path):
        return read_torch_snapshot(path, device=device)
    if device is not None:
        raise TraceError(
            f"{os.fspath(path)}: a recorded trace is of one device and does not say which; a "
            "device is chosen of torch's snapshots"
        )
    events: list[TraceEvent] = []
    with Path(path).open(encoding="utf-8") as file:
        try:
            lines = enumerate(file, start=1)
            _, header = next(lines, (1, ""))
            _check_header(header, path)
            for number, line in lines:
                if line.strip():
                    events.append(_parse_event(line, f"{os.fspath(path)}:{number}"))
        except UnicodeDecodeError as error:
            raise TraceError(f"{os.fspath(path)} is not text: {error}") from None
    return events


def is_torch_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a pickle, as torch's snapshots are, and no trace."""
    with Path(path).open("rb") as start:
        return start.read(1) == _PICKLE


def _record_of(event: TraceEvent) -> dict[str, str | int]:
    """What is not a default; block and size always, but for marks."""
    record: dict[str, str | int] = {"action": event.action}
    if event.action != "mark":
        record |= {"block_id": event.block_id, "size_bytes": event.size_bytes}
    for name, default in _DEFAULTS.items():
        value = getattr(event, name)
        if value != default:
            record[name] = value
    return record


def _check_header(line: str, path: str | os.PathLike[str]) -> None:
    try:
        header = _parse_object(line, f"{os.fspath(path)}:1")
    except TraceError:
        header = {}
    if header.get("format") != _FORMAT:
        raise TraceError(
            f'{os.fspath(path)}:1: expected {{"format": "{_FORMAT}", "version": {_VERSION}}} in '
            "the first line, got "
            f"{line.strip()[:80]!r}; write traces with `gpu-alloc record` or save_trace"
        )
    if header.get("version") not in _READ_VERSIONS:
        raise TraceError(
            f"{os.fspath(path)}:1: trace version {header.get('version')!r}, but this gpu-alloc "
            f"reads versions {_READ_VERSIONS}; "
            "update gpu-alloc"
        )


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TraceError(f"{where}: expected a JSON object, got a {type(value).__name__}")
    return value


def _parse_event(line: str, where: str) -> TraceEvent:
    record = _parse_object(line, where)
    unknown = sorted(record.keys() - _DEFAULTS.keys())
    needed = _NEEDED.get(str(record.get("action")), {"action", "block_id", "size_bytes"})
    missing = sorted(needed - record.keys())
    if unknown or missing:
        raise TraceError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; expected {sorted(_DEFAULTS)}"
        )
    try:
        return TraceEvent(**record)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from None

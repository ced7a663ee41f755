"""A trace as one SVG file, which opens offline: live and reserved bytes over time, and the map of
addresses below, each block a box from its allocation to its free.

Invariant: the boxes are the placements of a replay; of too many, the largest are drawn, and the
picture says how many are left out.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpu_alloc.core import AllocatorConfig, format_bytes
from gpu_alloc.errors import check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.trace.torch_snapshot import merged, torch_snapshot

_WIDTH, _CURVES, _MAP, _LEFT, _TOP, _GAP = 1200, 220, 420, 90, 40, 30
_MOST_BOXES = 4000
_Entries = Sequence[dict[str, Any]]


def save_plot(
    trace: Sequence[TraceEvent],
    path: str | os.PathLike[str],
    config: AllocatorConfig | None = None,
) -> int:
    """Draw `trace` as placed under `config`; returns the number of blocks that were left out.

    Raises TraceError as `replay` does.
    """
    check_kind(trace, Sequence, "trace must be a sequence of TraceEvents")
    check_kind(path, (str, os.PathLike), "path must be a str or a Path")
    history: _Entries = torch_snapshot(trace, config)["device_traces"][0]
    bases, total = _bases(history)
    boxes = sorted(_boxes(history, bases), key=lambda box: -box[3])
    left_out = max(len(boxes) - _MOST_BOXES, 0)
    live, reserved = _curves(history)
    parts = [*_frame(live, reserved, total, left_out)]
    parts += [_curve(reserved, max(reserved, default=1), "#bbbbbb")]
    parts += [_curve(live, max(reserved, default=1), "#1f5fa8")]
    parts += [_box(box, len(history), total) for box in boxes[:_MOST_BOXES]]
    Path(path).write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")
    return left_out


def _bases(history: _Entries) -> tuple[dict[int, int], int]:
    """Where the addresses that were ever held stand on the map, one run after the other, and the
    sum of their sizes.
    """
    taken = (e for e in history if e["action"] in ("segment_alloc", "segment_map"))
    bases, total = {}, 0
    for start, end in merged((e["addr"], e["addr"] + e["size"]) for e in taken):
        bases[start] = total
        total += end - start
    return bases, max(total, 1)


def _boxes(
    history: _Entries, bases: dict[int, int]
) -> Iterator[tuple[int, int, int, int, int, str]]:
    """(begin, end, place on the map, size, stream, line) of each block."""
    chunks = sorted(bases)
    live: dict[int, tuple[int, dict[str, Any]]] = {}
    for time, entry in enumerate(history):
        if entry["action"] == "alloc":
            live[entry["addr"]] = (time, entry)
        elif entry["action"] == "free_completed":
            begin, taken = live.pop(entry["addr"])
            yield _box_of(begin, time, taken, chunks, bases)
    for begin, taken in live.values():
        yield _box_of(begin, len(history), taken, chunks, bases)


def _box_of(
    begin: int, end: int, taken: dict[str, Any], chunks: list[int], bases: dict[int, int]
) -> tuple[int, int, int, int, int, str]:
    chunk = chunks[bisect_right(chunks, taken["addr"]) - 1]
    place = bases[chunk] + taken["addr"] - chunk
    line = next((f"{f['filename']}:{f['line']}" for f in taken["frames"]), "")
    return begin, end, place, taken["size"], taken["stream"], line


def _curves(history: _Entries) -> tuple[list[int], list[int]]:
    live = reserved = 0
    live_curve, reserved_curve = [], []
    changes = {"alloc": (1, 0), "free_completed": (-1, 0)}
    changes |= {"segment_alloc": (0, 1), "segment_free": (0, -1)}
    changes |= {"segment_map": (0, 1), "segment_unmap": (0, -1)}
    for entry in history:
        sign_live, sign_reserved = changes.get(entry["action"], (0, 0))
        live += sign_live * entry["size"]
        reserved += sign_reserved * entry["size"]
        live_curve.append(live)
        reserved_curve.append(reserved)
    return live_curve, reserved_curve


def _frame(live: list[int], reserved: list[int], total: int, left_out: int) -> Iterator[str]:
    height = _TOP + _CURVES + _GAP + _MAP + _GAP
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    title = (
        f"live up to {format_bytes(max(live, default=0))}, reserved up to "
        f"{format_bytes(max(reserved, default=0))}"
    )
    if left_out:
        title += f"; {left_out} smaller blocks are not drawn"
    yield f'<text x="{_LEFT}" y="20">{title}</text>'
    for y, size, label in (
        (_TOP + 10, max(reserved, default=0), "bytes"),
        (_TOP + _CURVES + _GAP + 10, total, "addresses"),
    ):
        yield f'<text x="4" y="{y}">{format_bytes(size)}</text>'
        yield f'<text x="4" y="{y + 16}" fill="#777777">{label}</text>'


def _curve(values: list[int], top: int, color: str) -> str:
    step = max(len(values) // (4 * _WIDTH), 1)
    columns = [max(values[i : i + step]) for i in range(0, len(values), step)]
    points = " ".join(
        f"{_LEFT + _WIDTH * i / max(len(columns), 1):.1f},"
        f"{_TOP + _CURVES * (1 - value / max(top, 1)):.1f}"
        for i, value in enumerate(columns)
    )
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>'


def _box(box: tuple[int, int, int, int, int, str], num_entries: int, total: int) -> str:
    begin, end, place, size, stream, line = box
    x = _LEFT + _WIDTH * begin / num_entries
    y = _TOP + _CURVES + _GAP + _MAP * (1 - (place + size) / total)
    hue = (stream * 67 + 210) % 360
    width, height = _WIDTH * (end - begin) / num_entries, _MAP * size / total
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" '
        f'height="{max(height, 0.2):.2f}" fill="hsl({hue},55%,60%)" '
        f'stroke="#ffffff" stroke-width="0.2"><title>{format_bytes(size)}, stream {stream}'
        f"{escape(' ' + line)}</title></rect>"
    )

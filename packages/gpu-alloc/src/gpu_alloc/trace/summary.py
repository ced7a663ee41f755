"""What is in a trace: how much is live when, and which lines hold it at the peak.

Invariant: the lines' bytes at the peak add up to the peak of live bytes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from gpu_alloc.errors import check_kind
from gpu_alloc.events import TraceEvent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A trace in numbers. phase: the mark before the peak. peak_by_line: bytes that are live at the
    peak, by the line that asked ("" where that is not known), largest first.
    """

    num_events: int
    num_allocations: int
    num_streams: int
    num_threads: int
    largest_bytes: int
    peak_live_bytes: int
    peak_event: int
    phase: str
    live_at_end_bytes: int
    peak_by_line: tuple[tuple[str, int], ...]


def summarize(trace: Sequence[TraceEvent]) -> Summary:
    """Add a trace up; frees of what is not live are left to `replay` to refuse."""
    check_kind(trace, Sequence, "trace must be a sequence of TraceEvents")
    taken = [event for event in trace if event.action == "alloc"]
    curve = list(live_curve(trace))
    peak = max(curve, default=0)
    peak_event = curve.index(peak) if curve else 0
    live: dict[int, TraceEvent] = {}
    phase = ""
    for event in trace[: peak_event + 1]:
        if event.action == "alloc":
            live[event.block_id] = event
        elif event.action == "free":
            live.pop(event.block_id, None)
        else:
            phase = event.note
    lines: Counter[str] = Counter()
    for event in live.values():
        lines[event.note] += event.size_bytes
    return Summary(
        num_events=len(trace),
        num_allocations=len(taken),
        num_streams=len({event.stream for event in taken}),
        num_threads=len({event.thread for event in trace}),
        largest_bytes=max((event.size_bytes for event in taken), default=0),
        peak_live_bytes=peak,
        peak_event=peak_event,
        phase=phase,
        live_at_end_bytes=curve[-1] if curve else 0,
        peak_by_line=tuple(lines.most_common()),
    )


def live_curve(trace: Sequence[TraceEvent]) -> Iterator[int]:
    """Live bytes after each event."""
    sizes: dict[int, int] = {}
    total = 0
    for event in trace:
        if event.action == "alloc":
            sizes[event.block_id] = event.size_bytes
            total += event.size_bytes
        elif event.action == "free":
            total -= sizes.pop(event.block_id, 0)
        yield total

"""Why a trace fails on a device, in bytes, and a change of settings whose replay succeeds.

Invariant: a change that is named was replayed on the same device and ran the whole trace; when none
is named, every candidate of the tuner failed there.

>>> trace = [TraceEvent(action="alloc", block_id=1, size_bytes=3 << 20)]
>>> explain(trace, AllocatorConfig(), 2 << 20).possible
False
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import final

from gpu_alloc.core import MIB, AllocatorConfig, OomReport, format_bytes
from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.trace.replaying import replay_requests
from gpu_alloc.trace.requests import Requests
from gpu_alloc.trace.tuning import candidates, tune


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why event `num_event` of a trace failed on `capacity_bytes`, and what helps.

    Of the device, in bytes: live in blocks; fragmented: free for the request's stream, but in
    places that are too small; idle_elsewhere: free, but of other streams; unreserved: never taken
    from the source, or given back. possible: whether the trace's peak of live bytes fits at all.
    change: the settings under which the whole trace runs on this device, or None.
    """

    num_event: int
    event: TraceEvent
    phase: str
    report: OomReport
    capacity_bytes: int
    live_bytes: int
    fragmented_bytes: int
    idle_elsewhere_bytes: int
    unreserved_bytes: int
    peak_live_bytes: int
    possible: bool
    num_tried: int
    change: AllocatorConfig | None
    before: AllocatorConfig

    def message(self) -> str:
        """The explanation as lines of text."""
        lines = [
            f"{self._request()}, found no room on {format_bytes(self.capacity_bytes)}",
            f"  live                  {format_bytes(self.live_bytes):>12}",
            f"  fragmented            {format_bytes(self.fragmented_bytes):>12}",
            f"  idle in other streams {format_bytes(self.idle_elsewhere_bytes):>12}",
            f"  not reserved          {format_bytes(self.unreserved_bytes):>12}",
        ]
        return "\n".join([*lines, f"  {self.remedy()}"])

    def _request(self) -> str:
        event, requested = self.event, self.report.requested_bytes
        size = format_bytes(requested)
        if event.action != "alloc" or event.size_bytes != requested:  # it was before any event
            return f"pre-allocation: {size} for the {self.report.pool} pool"
        where = f" in {self.phase!r}" if self.phase else ""
        line = f", asked for at {event.note}" if event.note else ""
        return f"event {self.num_event}{where}: {size} on stream {event.stream}{line}"

    def remedy(self) -> str:
        """What to change, as it was replayed, or that nothing helps."""
        if self.change is not None:
            changed = ",".join(
                f"{f.name}:{str(getattr(self.change, f.name)).lower()}"
                for f in fields(self.change)
                if getattr(self.change, f.name) != getattr(self.before, f.name)
            )
            return f"the whole trace runs with {changed}"
        if not self.possible:
            return (
                f"no settings help: {format_bytes(self.peak_live_bytes)} are live at once; keep "
                "less alive (smaller microbatch, activation recompute) or take a larger device"
            )
        return (
            f"none of the {self.num_tried} settings that were replayed runs it, though "
            f"{format_bytes(self.peak_live_bytes)} live bytes would fit; take a larger device"
        )


def explain(
    trace: Sequence[TraceEvent], config: AllocatorConfig, capacity_bytes: int
) -> Explanation | None:
    """Why `trace` fails under `config` on a device of `capacity_bytes`; None when it runs.

    Raises AllocValueError for a device without memory or a trace that allocates nothing, TraceError
    as `replay` does.
    """
    check_kind(trace, Sequence, "trace must be a sequence of TraceEvents")
    check_kind(capacity_bytes, int, "capacity_bytes must be a whole number")
    if capacity_bytes < 1:
        raise AllocValueError(f"capacity_bytes={capacity_bytes}; a device has memory")
    requests = Requests(trace)
    if not requests.peak_live_bytes:
        raise AllocValueError("the trace allocates nothing; record a program that does")
    result = replay_requests(requests, config, capacity_bytes)
    if result.oom is None:
        return None
    report, stats = result.oom, result.oom.stats
    limit = min(capacity_bytes, report.limit_bytes or capacity_bytes)
    peak = requests.peak_live_bytes
    change, num_tried = None, 0
    if peak <= capacity_bytes:
        change, num_tried = _change(trace, requests, config, capacity_bytes)
    return Explanation(
        num_event=result.num_events,
        event=trace[result.num_events],
        phase=_phase(trace[: result.num_events]),
        report=report,
        capacity_bytes=limit,
        live_bytes=stats.allocated_bytes,
        fragmented_bytes=report.usable_bytes,
        idle_elsewhere_bytes=stats.free_bytes - report.usable_bytes,
        unreserved_bytes=limit - stats.reserved_bytes,
        peak_live_bytes=peak,
        possible=peak <= capacity_bytes,
        num_tried=num_tried,
        change=change,
        before=config,
    )


def _change(
    trace: Sequence[TraceEvent], requests: Requests, config: AllocatorConfig, capacity_bytes: int
) -> tuple[AllocatorConfig | None, int]:
    """The first settings that run the trace: the given ones without their limit, the tuner's
    candidates for this device, and what the tuner finds, held to the device that it found.
    """
    tried = [replace(config, memory_limit_in_mb=0)]
    made = candidates(requests).values()
    tried += [candidate(capacity_bytes // MIB) for candidate in made]
    for number, settings in enumerate(tried, start=1):
        settings = replace(settings, alignment_size=config.alignment_size)
        if requests.run(settings, capacity_bytes)[1] is None:
            return settings, number
    tuned = tune(trace)
    if tuned.capacity_bytes <= capacity_bytes:
        held = replace(tuned.config, memory_limit_in_mb=tuned.capacity_bytes // MIB)
        if requests.run(held, capacity_bytes)[1] is None:
            return held, len(tried) + 1
    return None, len(tried) + 1


def _phase(events: Sequence[TraceEvent]) -> str:
    return next((event.note for event in reversed(events) if event.action == "mark"), "")

"""Run a trace through the policy without a device, to learn what a configuration would have needed.

Peak reserved memory without a limit says little, since an eager policy reserves what it could do
without. The comparable figure is `minimal_capacity`: the smallest device on which the trace still
runs.

>>> trace = [TraceEvent(action="alloc", block_id=1, size_bytes=3 << 20)]
>>> replay(trace, AllocatorConfig()).peak_reserved_bytes >> 20
4
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from gpu_alloc.core import AllocatorConfig, OomReport, Stats, TwoPoolAllocator
from gpu_alloc.errors import AllocValueError, check_kind
from gpu_alloc.events import TraceEvent
from gpu_alloc.plan import LifetimePlan
from gpu_alloc.trace.requests import GRANULARITY_BYTES, Requests, check_request


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What one replay saw.

    peak_live_bytes: most bytes requested and not yet freed at a time, the floor of any policy.
    peak_reserved_bytes: most bytes taken from the source at a time.
    num_events: events done; the event with this index (from 0) ran out of memory when `oom` is not
        None.
    stats: the allocator's counters at the end.
    """

    peak_live_bytes: int
    peak_reserved_bytes: int
    num_events: int
    oom: OomReport | None
    stats: Stats


def replay(
    trace: Iterable[TraceEvent],
    config: AllocatorConfig,
    capacity_bytes: int | None = None,
    plan: LifetimePlan | None = None,
) -> ReplayResult:
    """Run `trace` on `capacity_bytes` of invented addresses (None: no limit) to its end or failure.

    Memory is granted in whole 2 MiB pages, as a GPU does. plan: followed from the start, a step
    beginning at each mark that is the like of its own. Raises TraceError naming the event for a
    block that is allocated twice or freed without being allocated, and AllocValueError for a
    negative capacity.
    """
    return replay_requests(Requests(trace, plan), config, capacity_bytes)


def replay_requests(
    requests: Requests, config: AllocatorConfig, capacity_bytes: int | None = None
) -> ReplayResult:
    """As `replay`, of a trace that was read before."""
    num_events, oom, stats = requests.run(config, capacity_bytes)
    return ReplayResult(
        peak_live_bytes=stats.requested_peak_bytes,
        peak_reserved_bytes=stats.reserved_peak_bytes,
        num_events=num_events,
        oom=oom,
        stats=stats,
    )


def minimal_capacity(
    trace: Sequence[TraceEvent],
    config: AllocatorConfig,
    *,
    resolution_bytes: int = GRANULARITY_BYTES,
    plan: LifetimePlan | None = None,
) -> int:
    """Smallest capacity, to `resolution_bytes`, on which `trace` replays to its end, found by
    bisection.

    plan: see `replay`. The search assumes that more memory never hurts; where a policy breaks that,
    the result is a capacity that works and of which the next lower step fails. Raises
    AllocValueError for a resolution below 1, TraceError as `replay` does.
    """
    check_kind(resolution_bytes, int, "resolution_bytes must be a whole number")
    if resolution_bytes < 1:
        raise AllocValueError(
            f"resolution_bytes={resolution_bytes} is below 1; use for example {GRANULARITY_BYTES}"
        )
    return least_capacity(Requests(trace, plan), config, resolution_bytes=resolution_bytes)


def least_capacity(
    requests: Requests, config: AllocatorConfig, *, resolution_bytes: int = GRANULARITY_BYTES
) -> int:
    """As `minimal_capacity`, of a trace that was read before."""
    unlimited = replay_requests(requests, config)
    if unlimited.oom is not None:
        raise AllocValueError(
            f"the trace does not fit under the configuration's own limit: {unlimited.oom.remedy()}"
        )
    fails = unlimited.peak_live_bytes // resolution_bytes - 1
    works = -(-unlimited.peak_reserved_bytes // resolution_bytes)
    while works - fails > 1:
        middle = (works + fails) // 2
        if middle >= 0 and requests.run(config, middle * resolution_bytes)[1] is None:
            works = middle
        else:
            fails = middle
    return works * resolution_bytes


def apply_event(
    event: TraceEvent, index: int, allocator: TwoPoolAllocator, live: dict[int, int]
) -> None:
    """Have `allocator` do what `event` says; `live` has the pointer of each block of the trace.

    Raises TraceError naming the event for one that contradicts those before it.
    """
    check_request(event, index, live)
    if event.action == "alloc":
        live[event.block_id] = allocator.malloc(event.size_bytes, event.stream).ptr
    elif event.action == "free":
        allocator.free(live.pop(event.block_id))

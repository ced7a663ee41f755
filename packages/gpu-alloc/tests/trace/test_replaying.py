import random
from collections.abc import Iterable

import pytest

from gpu_alloc import (
    AllocatorConfig,
    AllocError,
    TraceEvent,
    minimal_capacity,
    replay,
)

MIB = 1 << 20


def _trace(*steps: tuple[str, int, int]) -> list[TraceEvent]:
    return [TraceEvent(action=a, block_id=i, size_bytes=size) for a, i, size in steps]


def _random_trace(rng: random.Random, num_steps: int) -> list[TraceEvent]:
    live: list[int] = []
    events: list[TraceEvent] = []
    for step in range(num_steps):
        if live and rng.random() < 0.48:
            block = live.pop(rng.randrange(len(live)))
            events.append(TraceEvent(action="free", block_id=block, size_bytes=0))
        else:
            size = int(10 ** rng.uniform(1, 7.5))
            events.append(TraceEvent(action="alloc", block_id=step, size_bytes=size))
            live.append(step)
    return events


def _peak_live(trace: Iterable[TraceEvent]) -> int:
    live: dict[int, int] = {}
    peak = 0
    for event in trace:
        if event.action == "alloc":
            live[event.block_id] = event.size_bytes
        else:
            del live[event.block_id]
        peak = max(peak, sum(live.values()))
    return peak


def test_peaks_are_those_of_the_requests_and_the_pages() -> None:
    trace = _trace(("alloc", 1, 3 * MIB), ("free", 1, 0), ("alloc", 2, MIB), ("alloc", 3, 0))
    result = replay(trace, AllocatorConfig())
    assert result.peak_live_bytes == 3 * MIB
    assert result.peak_reserved_bytes == 6 * MIB
    assert (result.num_events, result.oom) == (4, None)


def test_out_of_memory_stops_the_replay_and_is_reported() -> None:
    trace = _trace(("alloc", 1, 3 * MIB), ("alloc", 2, 4 * MIB), ("free", 1, 0))
    result = replay(trace, AllocatorConfig(), capacity_bytes=6 * MIB)
    assert result.num_events == 1
    assert result.oom is not None
    assert result.oom.requested_bytes == 4 * MIB
    assert result.peak_reserved_bytes == 4 * MIB


def test_pre_allocation_beyond_the_capacity_fails_before_the_first_event() -> None:
    config = AllocatorConfig(large_pool_pre_alloc_in_mb=8)
    result = replay(_trace(("alloc", 1, 1)), config, capacity_bytes=4 * MIB)
    assert result.num_events == 0
    assert result.oom is not None


def test_empty_trace_needs_nothing() -> None:
    result = replay([], AllocatorConfig(), capacity_bytes=0)
    assert (result.peak_live_bytes, result.peak_reserved_bytes, result.oom) == (0, 0, None)
    assert minimal_capacity([], AllocatorConfig()) == 0


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([("free", 5, 0)], "event 0 frees block 5"),
        ([("alloc", 5, 1), ("free", 5, 0), ("free", 5, 0)], "event 2 frees block 5"),
        ([("alloc", 5, 1), ("alloc", 5, 1)], "event 1 allocates block 5"),
    ],
)
def test_contradicting_trace_is_refused(steps: list[tuple[str, int, int]], said: str) -> None:
    with pytest.raises(AllocError, match=said):
        replay(_trace(*steps), AllocatorConfig())


def test_zero_sized_blocks_are_tracked_like_others() -> None:
    steps = [("alloc", 5, 0), ("alloc", 6, 0), ("free", 5, 0), ("free", 6, 0), ("alloc", 5, 0)]
    assert replay(_trace(*steps), AllocatorConfig()).num_events == 5


def test_streams_of_the_trace_do_not_share_memory() -> None:
    one = _trace(("alloc", 1, 2 * MIB), ("free", 1, 0))
    other = [TraceEvent(action="alloc", block_id=2, size_bytes=2 * MIB, stream=1)]
    assert replay(one + other, AllocatorConfig()).peak_reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    "config",
    [
        AllocatorConfig(),
        AllocatorConfig(large_pool_auto_growth_chunk_size_in_mb=64),
        AllocatorConfig(small_pool_size_in_mb=0, large_pool_pre_alloc_in_mb=32),
    ],
)
def test_minimal_capacity_is_the_border_between_failing_and_running(
    config: AllocatorConfig,
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = _random_trace(random.Random(seed), 300)
    found = minimal_capacity(trace, config)
    assert replay(trace, config, found).oom is None, f"seed {seed}"
    assert replay(trace, config, found - 2 * MIB).oom is not None, f"seed {seed}"
    assert found >= replay(trace, config).peak_live_bytes == _peak_live(trace), f"seed {seed}"


def test_minimal_capacity_refuses_what_it_cannot_search() -> None:
    with pytest.raises(ValueError, match="resolution_bytes=0"):
        minimal_capacity([], AllocatorConfig(), resolution_bytes=0)
    trace = _trace(("alloc", 1, 9 * MIB))
    with pytest.raises(ValueError, match="own limit"):
        minimal_capacity(trace, AllocatorConfig(memory_limit_in_mb=8))

import random
from collections.abc import Callable

import pytest

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, replay
from gpu_alloc.trace import explain, tune

MIB = 1 << 20
Traces = Callable[..., list[TraceEvent]]


def test_a_trace_that_runs_needs_no_explanation(moe_trace: Traces) -> None:
    assert explain(moe_trace(1), AllocatorConfig(), 1 << 40) is None


def test_a_trace_that_allocates_nothing_is_refused() -> None:
    """It would run on any device, which says nothing about the program."""
    with pytest.raises(ValueError, match="allocates nothing"):
        explain([TraceEvent(action="mark", note="step 1")], AllocatorConfig(), 1 << 40)


@pytest.mark.parametrize("streams", [(0,), (0, 7)])
def test_the_change_succeeds_on_replay_whenever_the_tuner_finds_one(
    moe_trace: Traces, streams: tuple[int, ...]
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = moe_trace(seed, streams=streams)
    tuned = tune(trace)
    for capacity in (tuned.capacity_bytes - 2 * MIB, tuned.capacity_bytes):
        found = explain(trace, AllocatorConfig(), capacity)
        if found is None:
            continue
        if found.change is not None:
            assert replay(trace, found.change, capacity).oom is None, f"seed {seed}"
            assert "runs with" in found.remedy()
        assert found.change is not None or capacity < tuned.capacity_bytes, f"seed {seed}"


def test_the_bytes_of_the_device_add_up(moe_trace: Traces) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = moe_trace(seed, streams=(0, 7))
    capacity = replay(trace, AllocatorConfig()).peak_live_bytes + MIB
    found = explain(trace, AllocatorConfig(), capacity)
    assert found is not None, f"seed {seed}"
    parts = (found.live_bytes, found.fragmented_bytes, found.idle_elsewhere_bytes)
    assert sum(parts) + found.unreserved_bytes == capacity, f"seed {seed}"
    assert min(parts) >= 0
    assert found.unreserved_bytes >= 0
    assert found.event is trace[found.num_event]
    assert found.phase.startswith("step ")
    assert found.event.note in found.message()


def test_more_live_bytes_than_the_device_has_are_said_to_be_hopeless(moe_trace: Traces) -> None:
    found = explain(moe_trace(5), AllocatorConfig(), 4 * MIB)
    assert found is not None
    assert (found.possible, found.change, found.num_tried) == (False, None, 0)
    assert "no settings help" in found.remedy()


def test_a_limit_that_is_too_low_is_lifted() -> None:
    trace = [TraceEvent(action="alloc", block_id=1, size_bytes=6 * MIB)]
    found = explain(trace, AllocatorConfig(memory_limit_in_mb=4), 8 * MIB)
    assert found is not None
    assert found.remedy() == "the whole trace runs with memory_limit_in_mb:0"


def test_a_pre_allocation_that_does_not_fit_is_named_and_no_event() -> None:
    trace = [
        TraceEvent(action="mark", note="step 1"),
        TraceEvent(action="alloc", block_id=1, size_bytes=3 * MIB),
    ]
    found = explain(trace, AllocatorConfig(large_pool_pre_alloc_in_mb=50), 8 * MIB)
    assert found is not None
    first = found.message().splitlines()[0]
    assert first == "pre-allocation: 50.00 MiB for the large pool, found no room on 8.00 MiB"
    found = explain(trace, AllocatorConfig(memory_limit_in_mb=2), 8 * MIB)
    assert found is not None
    assert found.message().startswith("event 1 in 'step 1': 3.00 MiB on stream 0, found no room")


def test_another_streams_idle_memory_is_counted() -> None:
    trace = [
        TraceEvent(action="alloc", block_id=1, size_bytes=6 * MIB, stream=1),
        TraceEvent(action="alloc", block_id=2, size_bytes=2 * MIB, stream=1),
        TraceEvent(action="free", block_id=1),
        TraceEvent(action="alloc", block_id=3, size_bytes=4 * MIB, stream=2),
    ]
    config = AllocatorConfig(large_pool_pre_alloc_in_mb=8)
    found = explain(trace, config, 8 * MIB)
    assert found is not None
    assert (found.live_bytes, found.idle_elsewhere_bytes) == (2 * MIB, 6 * MIB)
    assert found.change is not None
    assert replay(trace, found.change, 8 * MIB).oom is None, "growth gives idle chunks back"


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(AllocError, match="a device has memory"):
        explain([], AllocatorConfig(), 0)

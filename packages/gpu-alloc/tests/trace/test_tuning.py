import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, minimal_capacity, replay
from gpu_alloc.trace import tune, tuning

MIB = 1 << 20
Traces = Callable[..., list[TraceEvent]]


def test_what_is_tuned_was_replayed_and_is_no_worse_than_the_defaults(moe_trace: Traces) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = moe_trace(seed, steps=4)
    tuned = tune(trace)
    result = replay(trace, tuned.config, tuned.capacity_bytes)
    assert result.oom is None, f"seed {seed}"
    assert result.peak_live_bytes == tuned.peak_live_bytes
    assert tuned.capacity_bytes == pytest.approx(tuned.ratio * tuned.peak_live_bytes)
    # Mapped pages are taken for fitted settings where they need up to 3% more.
    assert tuned.capacity_bytes <= 1.03 * minimal_capacity(trace, AllocatorConfig()), f"seed {seed}"


def test_the_defaults_are_measured_though_they_begin_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fill no pages, where a slab is best; then a block that grows beside one that
    stays, where a slab leaves a hole and growth by the request gives the old chunk back.
    """
    monkeypatch.setattr(tuning, "_FINALISTS", 1)
    trace = [
        TraceEvent(action="alloc", block_id=number, size_bytes=2 * MIB + 512)
        for number in range(12)
    ]
    for step in range(6):
        for number, size in ((100, (200 + 20 * step) * MIB), (200 + step, 3 * MIB)):
            trace.append(TraceEvent(action="alloc", block_id=number, size_bytes=size))
        trace.append(TraceEvent(action="free", block_id=100))
    tuned = tune(trace)
    assert tuned.capacity_bytes <= minimal_capacity(trace, AllocatorConfig())


@pytest.mark.parametrize("seed", range(4))
def test_virtual_memory_is_taken_unless_fitted_settings_need_3_percent_less(
    moe_trace: Traces, seed: int
) -> None:
    trace, other = moe_trace(seed, steps=3), moe_trace(seed + 100, steps=3)
    plain, tuned = tune(trace, virtual_memory=False), tune(trace)
    assert not plain.config.use_virtual_memory
    pages = AllocatorConfig(use_virtual_memory=True)
    tried = replay(trace, pages, int(1.03 * plain.capacity_bytes))
    near = tried.oom is None and tried.stats.num_source_calls <= 0.05 * len(trace) + 100
    assert tuned.config.use_virtual_memory == near
    assert tuned.capacity_bytes <= 1.03 * plain.capacity_bytes
    if near:
        live = replay(other, pages).peak_live_bytes
        # Both pools may end in a page of 2 MiB that they hardly use.
        assert minimal_capacity(other, tuned.config) <= 1.02 * live + 4 * MIB


def test_what_virtual_memory_may_be_is_checked(moe_trace: Traces) -> None:
    with pytest.raises(TypeError, match="virtual_memory must be True or False"):
        tune(moe_trace(1), virtual_memory=1)


def test_blocks_far_smaller_than_pages_are_given_fitted_settings() -> None:
    """Of two pools that map pages each takes its own: pages need twice what one pool does."""
    trace = [
        TraceEvent(action="alloc", block_id=1, size_bytes=512),
        TraceEvent(action="alloc", block_id=2, size_bytes=MIB + 512),
    ]
    tuned = tune(trace)
    assert tuned.capacity_bytes == 2 * MIB
    assert not tuned.config.use_virtual_memory


def test_settings_survive_their_file(tmp_path: Path, moe_trace: Traces) -> None:
    tuned = tune(moe_trace(3))
    tuned.save(tmp_path / "tuned.toml")
    assert AllocatorConfig.from_toml(tmp_path / "tuned.toml") == tuned.config
    assert str(tuned.capacity_bytes) in (tmp_path / "tuned.toml").read_text()


def test_alignment_counts_in_the_ratio() -> None:
    trace = [TraceEvent(action="alloc", block_id=1, size_bytes=2 * MIB)]
    assert tune(trace).ratio == 1.0


@pytest.mark.parametrize(
    ("first", "said"), [(0.0, r"outside \(0, 1\]"), (1.5, "outside"), ("x", "number")]
)
def test_a_part_that_is_none_is_refused(first: float, said: str) -> None:
    with pytest.raises(AllocError, match=said):
        tune([TraceEvent(action="alloc", block_id=1, size_bytes=2)], first=first)


def test_a_trace_without_allocations_is_refused() -> None:
    with pytest.raises(AllocError, match="allocates nothing"):
        tune([TraceEvent(action="mark", note="step")])


def test_a_smaller_device_is_paid_for_with_calls_that_wait_for_it(moe_trace: Traces) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    trace = moe_trace(seed, steps=3)
    usual, any_number = tune(trace), tune(trace, calls_per_event=2)
    assert usual.num_source_calls <= 0.05 * len(trace) + 100, f"seed {seed}"
    assert any_number.capacity_bytes <= 1.03 * usual.capacity_bytes, f"seed {seed}"
    for tuned in (usual, any_number):
        result = replay(trace, tuned.config, tuned.capacity_bytes)
        assert result.oom is None, f"seed {seed}"
        assert result.stats.num_source_calls == tuned.num_source_calls, f"seed {seed}"
    with pytest.raises(ValueError, match="calls_per_event=-1 is not 0 or more"):
        tune(trace, calls_per_event=-1)

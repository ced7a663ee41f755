from collections.abc import Callable
from pathlib import Path

from gpu_alloc import AllocatorConfig, TraceEvent, minimal_capacity, save_trace
from gpu_alloc.trace import compare, save_torch_snapshot
from gpu_alloc.trace.comparing import torch_reserved_peak

MIB = 1 << 20
Traces = Callable[..., list[TraceEvent]]


def test_each_policy_has_a_row_and_the_tuned_one_is_not_above_the_default(
    tmp_path: Path, moe_trace: Traces
) -> None:
    trace = moe_trace(7)
    save_trace(trace, tmp_path / "trace.jsonl")
    slab = AllocatorConfig(large_pool_auto_growth_chunk_size_in_mb=64)
    rows = compare(tmp_path / "trace.jsonl", {"default": AllocatorConfig(), "chunks": slab})
    assert [row.policy for row in rows[:2]] == ["default", "chunks"]
    assert rows[1].capacity_bytes == minimal_capacity(trace, slab)
    assert rows[2].policy.startswith("tuned: ")
    assert 1.0 <= rows[2].ratio <= rows[0].ratio
    assert len(rows) == 3


def test_a_torch_snapshot_has_a_row_of_what_was_reserved(tmp_path: Path) -> None:
    trace = [
        TraceEvent(action="alloc", block_id=1, size_bytes=4 * MIB),
        TraceEvent(action="alloc", block_id=2, size_bytes=2 * MIB),
        TraceEvent(action="free", block_id=1),
    ]
    config = AllocatorConfig(free_idle_chunk=True)
    save_torch_snapshot(trace, tmp_path / "torch.pickle", config)
    assert torch_reserved_peak(tmp_path / "torch.pickle") == 6 * MIB
    rows = compare(tmp_path / "torch.pickle", {})
    assert [(row.policy, row.ratio) for row in rows[1:]] == [("torch, as it ran", 1.0)]

from collections.abc import Callable

from gpu_alloc import AllocatorConfig, TraceEvent, replay
from gpu_alloc.trace import summarize

Traces = Callable[..., list[TraceEvent]]


def test_the_lines_at_the_peak_add_up_to_it(moe_trace: Traces) -> None:
    trace = moe_trace(21, streams=(0, 7))
    summary = summarize(trace)
    assert summary.peak_live_bytes == replay(trace, AllocatorConfig()).peak_live_bytes
    assert sum(size for _, size in summary.peak_by_line) == summary.peak_live_bytes
    assert (summary.num_streams, summary.num_threads) == (2, 1)
    assert summary.phase.startswith("step ")
    assert summary.num_allocations == sum(event.action == "alloc" for event in trace)
    assert summary.live_at_end_bytes == sum(e.size_bytes for e in trace[:5])
    assert summary.largest_bytes == max(event.size_bytes for event in trace)


def test_an_empty_trace_is_nothing() -> None:
    summary = summarize([])
    assert (summary.num_events, summary.peak_live_bytes, summary.peak_by_line) == (0, 0, ())

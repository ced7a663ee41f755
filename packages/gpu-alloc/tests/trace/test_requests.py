import random
from collections.abc import Callable

import pytest

from gpu_alloc import AllocatorConfig, TraceEvent, plan_step
from gpu_alloc.native import NativeUnavailableError, native_library
from gpu_alloc.trace import requests as module
from gpu_alloc.trace.requests import Requests

MIB = 1 << 20
Traces = Callable[..., list[TraceEvent]]


@pytest.mark.parametrize(
    "config",
    [
        AllocatorConfig(),
        AllocatorConfig(large_pool_pre_alloc_in_mb=40, small_pool_pre_alloc_in_mb=2),
        AllocatorConfig(small_pool_size_in_mb=0, free_when_no_cache_hit=True),
        AllocatorConfig(free_idle_chunk=True, memory_limit_in_mb=60),
        AllocatorConfig(use_virtual_memory=True),
    ],
)
@pytest.mark.parametrize("planned", [False, True])
def test_a_run_ends_alike_on_the_compiled_and_the_python_core(
    config: AllocatorConfig, planned: bool, moe_trace: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        native_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no compiled core: {error}")
    seed = random.SystemRandom().randrange(1 << 30)
    trace = moe_trace(seed, steps=2)
    requests = Requests(trace, plan_step(trace, "step 0") if planned else None)
    page = 2 * MIB
    least = requests.peak_live_bytes // page
    failed = 0
    for pages in (None, least - 5, least, least + 3, 2 * least, 4):
        capacity = None if pages is None else max(pages, 0) * page
        compiled = requests.run(config, capacity)
        with monkeypatch.context() as patch:
            patch.setattr(module, "is_compiled", lambda: False)
            assert requests.run(config, capacity) == compiled, f"seed {seed}, {pages} pages"
        failed += compiled[1] is not None
    assert failed >= 2, f"seed {seed}"


def test_numbers_that_c_has_not_are_left_to_python() -> None:
    far = 1 << 70
    trace = [TraceEvent(action="alloc", block_id=far, size_bytes=1000, stream=far)]
    trace.append(TraceEvent(action="alloc", block_id=1, size_bytes=far))
    num_events, oom, stats = Requests(trace).run(AllocatorConfig(), 1 << 30)
    assert num_events == 1
    assert oom is not None and oom.requested_bytes == far
    assert stats.requested_bytes == 1000


def test_marks_count_as_events() -> None:
    trace = [TraceEvent(action="mark", note="step 1")]
    trace += [TraceEvent(action="alloc", block_id=i, size_bytes=3 * MIB) for i in range(2)]
    trace.insert(2, TraceEvent(action="mark", note="step 2"))
    assert Requests(trace).run(AllocatorConfig(), 4 * MIB)[0] == 3

"""The whole loop without a GPU: record, tune, run again under the tuned pool."""

import contextlib
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc import (  # noqa: E402
    AddressSource,
    AllocatorConfig,
    AllocError,
    TraceEvent,
    TwoPoolAllocator,
    check_snapshot,
    minimal_capacity,
    plan_step,
)
from gpu_alloc.cupy import CupyBackend, HostBackend, TraceHook, uninstall, use  # noqa: E402
from gpu_alloc.sources import ChunkSource, HostSource, PagedAddressSource  # noqa: E402
from gpu_alloc.trace import tune  # noqa: E402


@pytest.fixture(autouse=True)
def _own_pool() -> Iterator[None]:
    """What fails leaves its pool to no test after it."""
    yield
    with contextlib.suppress(AllocError):
        uninstall()


def _program(seed: int, backend: HostBackend) -> None:
    """Arrays of layers, kept and dropped as training does, on two streams, written and read."""
    rng = random.Random(seed)
    weights = [cupy.ndarray((rng.randrange(1000, 3_000_000),), dtype="u1") for _ in range(6)]
    for _ in range(4):
        tokens = rng.randrange(100, 400)
        kept: list[Any] = []
        for _ in range(8):
            backend.current_stream = 0
            kept.append(cupy.ndarray((tokens * rng.randrange(900, 5000),), dtype="u1"))
            backend.current_stream = 7
            scratch = cupy.ndarray((tokens * 700,), dtype="u1")
            view = backend.source_of_host.view(scratch.data.ptr, scratch.nbytes)
            view[:] = bytes([tokens % 251]) * scratch.nbytes
            assert bytes(view[-3:]) == bytes([tokens % 251]) * 3
            view.release()
            del scratch
        backend.current_stream = 0
        while kept:
            kept.pop(rng.randrange(len(kept)))
    weights.clear()


def _placements(events: list[TraceEvent]) -> list[tuple[int, int, int]]:
    return [(e.chunk, e.offset_bytes, e.size_bytes) for e in events if e.action == "alloc"]


def _placements_on(
    allocator: TwoPoolAllocator, events: list[TraceEvent]
) -> list[tuple[int, int, int]]:
    """Where an allocator puts what a recording asks for."""
    allocator.start_recording()
    live: dict[int, int] = {}
    for event in events:
        if event.action == "alloc":
            live[event.block_id] = allocator.malloc(event.size_bytes, event.stream).ptr
        else:
            allocator.free(live.pop(event.block_id))
    return _placements(allocator.stop_recording())


@pytest.mark.parametrize(("pages", "first"), [(True, False), (False, False), (False, True)])
def test_a_program_recorded_and_tuned_runs_as_replayed(
    tmp_path: Path, pages: bool, first: bool
) -> None:
    # With 2 settings are found whose chunks are as large as single requests.
    seed = 2 if first else random.SystemRandom().randrange(1 << 30)
    # Record, on as much memory as the program likes.
    backend = HostBackend()
    use(backend=backend)
    with TraceHook(backend=backend) as hook:
        _program(seed, backend)
    gc.collect()
    uninstall()
    # Tune, and run again on exactly the capacity that was named.
    tuned = tune(hook.events, virtual_memory=pages)
    tuned.save(tmp_path / "tuned.toml")
    small = HostBackend(tuned.capacity_bytes)
    pool = use(tmp_path / "tuned.toml", backend=small)
    pool.allocator().start_recording()
    with TraceHook(backend=small) as again:
        _program(seed, small)
    gc.collect()
    recorded = pool.allocator().stop_recording()
    uninstall()
    assert small.source_of_host.used_bytes == 0
    # What was placed is what a replay of the first recording places, byte for byte.
    mapped = tuned.config.use_virtual_memory
    kind = PagedAddressSource if mapped else AddressSource
    replayed = TwoPoolAllocator(kind(tuned.capacity_bytes), tuned.config)
    assert _placements(recorded) == _placements_on(replayed, hook.events), f"seed {seed}"
    assert len(recorded) == len(hook.events) == len(again.events)


class _TakenHook(cupy.cuda.MemoryHook):  # type: ignore[misc]  # cupy has no types
    """Adds up what comes from the device."""

    name = "taken"

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def alloc_postprocess(self, **facts: int) -> None:
        self.sizes.append(facts["mem_size"])


def test_a_program_runs_on_pages_as_replayed_and_hooks_see_them_taken() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    backend = HostBackend()
    use(backend=backend)
    with TraceHook(backend=backend) as hook:
        _program(seed, backend)
    gc.collect()
    uninstall()
    config = AllocatorConfig(use_virtual_memory=True)
    capacity_bytes = minimal_capacity(hook.events, config)
    small = HostBackend(capacity_bytes)
    pool = use(config, backend=small)
    pool.allocator().start_recording()
    with _TakenHook() as taken:
        _program(seed, small)
    gc.collect()
    recorded = pool.allocator().stop_recording()
    uninstall()
    assert small.source_of_host.used_bytes == 0
    assert taken.sizes, f"seed {seed}"
    assert not any(size % (2 << 20) for size in taken.sizes)
    replayed = TwoPoolAllocator(PagedAddressSource(capacity_bytes), config)
    assert _placements(recorded) == _placements_on(replayed, hook.events), f"seed {seed}"


class _WithoutPages(CupyBackend):
    def device_id(self) -> int:
        return 0

    def stream(self) -> int:
        return 0

    def source(self, device_id: int) -> ChunkSource:
        return HostSource()

    def total_bytes(self) -> int:
        return 0


def test_a_backend_without_pages_says_what_to_set() -> None:
    pool = use(AllocatorConfig(use_virtual_memory=True), backend=_WithoutPages())
    try:
        with pytest.raises(ValueError, match=r"_WithoutPages has no source of pages .*to False"):
            pool.malloc(1)
    finally:
        uninstall()


def _step(sizes: list[int], backend: HostBackend) -> None:
    """Arrays of these sizes on two streams, kept and dropped as a forward and a backward do."""
    kept: list[Any] = []
    for number, size in enumerate(sizes):
        backend.current_stream = 7 * (number % 2)
        array = cupy.ndarray((size,), dtype="u1")
        view = backend.source_of_host.view(array.data.ptr, size)
        view[:] = bytes([number]) * size
        kept.append((number, array, view))
    for number, array, view in reversed(kept):
        assert view == bytes([number]) * array.nbytes, "nothing else was placed there"
        view.release()
    backend.current_stream = 0


@pytest.mark.parametrize("as_file", [False, True])
def test_the_plan_of_a_recorded_step_serves_the_steps_after_it(
    tmp_path: Path, as_file: bool
) -> None:
    backend = HostBackend()
    sizes = [(3 + n % 5) << 20 for n in range(12)]
    use(backend=backend)
    with TraceHook(backend=backend) as hook:
        for number in range(2):
            hook.mark(f"step {number}")
            _step(sizes, backend)
            hook.mark(f"end of step {number}")
    uninstall()
    plan = plan_step(hook.events, "step 1")
    plan.save(tmp_path / "plan.json")
    pool = use(backend=backend, plan=tmp_path / "plan.json" if as_file else plan)
    for _ in range(3):
        pool.begin_step()
        _step(sizes, backend)
    assert pool.plan_use() == (True, 3 * len(sizes), 0)
    assert pool.total_bytes() == -(-plan.size_bytes >> 21) << 21, "and no chunk beside it"
    # A step that differs: what the plan has not is placed as without one.
    pool.begin_step()
    _step([*sizes[:4], 9 << 20, *sizes[5:], 20 << 20], backend)
    followed = pool.plan_use()
    assert followed.is_following and followed.num_unplanned >= 2
    assert followed.num_planned > 3 * len(sizes) + 4
    assert check_snapshot(pool.allocator().snapshot()) == []
    uninstall()
    assert backend.source_of_host.used_bytes == 0


def test_a_plan_that_finds_no_room_or_does_not_fit_the_settings_is_refused() -> None:
    events = [
        TraceEvent(action="alloc", block_id=1, size_bytes=8 << 20),
        TraceEvent(action="free", block_id=1, size_bytes=8 << 20),
    ]
    plan = plan_step(events)
    with pytest.raises(AllocError, match="the plan is aligned to 512, the settings to 256"):
        use(AllocatorConfig(alignment_size=256), backend=HostBackend(), plan=plan)
    with pytest.raises(AllocError, match="torch's caching allocator follows no plan; give share="):
        use(backend=HostBackend(), share="torch", plan=plan)
    pool = use(backend=HostBackend(4 << 20), plan=plan)
    try:
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match=r"out of memory: 8\.00 MiB"):
            pool.malloc(1000)
    finally:
        uninstall()
    pool = use(backend=HostBackend())
    try:
        with pytest.raises(AllocError, match=r"follows no plan; give it one: use\(plan=...\)"):
            pool.begin_step()
    finally:
        uninstall()

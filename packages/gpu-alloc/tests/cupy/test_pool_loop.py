"""The whole loop without a GPU: record, tune, run again under the tuned pool."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc import AddressSource, TraceEvent, TwoPoolAllocator  # noqa: E402
from gpu_alloc.cupy import HostBackend, TraceHook, uninstall, use  # noqa: E402
from gpu_alloc.trace import tune  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::gpu_alloc.errors.CudaVersionWarning")


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


def test_a_program_recorded_and_tuned_runs_as_replayed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    # Record, on as much memory as the program likes.
    backend = HostBackend()
    use(backend=backend)
    with TraceHook(backend=backend) as hook:
        _program(seed, backend)
    gc.collect()
    uninstall()
    # Tune, and run again on exactly the capacity that was named.
    tuned = tune(hook.events)
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
    replayed = TwoPoolAllocator(
        AddressSource(tuned.capacity_bytes, granularity_bytes=4096), tuned.config
    )
    replayed.start_recording()
    live: dict[int, int] = {}
    for event in hook.events:
        if event.action == "alloc":
            live[event.block_id] = replayed.malloc(event.size_bytes, event.stream).ptr
        else:
            replayed.free(live.pop(event.block_id))
    assert _placements(recorded) == _placements(replayed.stop_recording()), f"seed {seed}"
    assert len(recorded) == len(hook.events) == len(again.events)

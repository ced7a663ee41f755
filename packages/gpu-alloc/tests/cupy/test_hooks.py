"""The recording hook, on host memory; and, marked `gpu`, on CuPy's own pool."""

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc import AllocatorConfig, AllocError, TraceEvent, replay  # noqa: E402
from gpu_alloc.cupy import HostBackend, TraceHook, install, uninstall  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    made = HostBackend(64 * MIB)
    install(AllocatorConfig(), backend=made)
    yield made
    gc.collect()
    uninstall()


def _requests(events: list[TraceEvent]) -> list[tuple[str, int]]:
    return [(e.action, e.size_bytes if e.action == "alloc" else 0) for e in events]


def test_the_hook_records_what_the_pool_records_itself(backend: HostBackend) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    allocator = cupy.cuda.get_allocator().__self__.allocator()
    allocator.start_recording()
    live: list[Any] = []
    with TraceHook(backend=backend) as hook:
        for _ in range(600):
            if live and rng.random() < 0.5:
                live.pop(rng.randrange(len(live)))
            else:
                backend.current_stream = rng.choice((0, 7))
                live.append(cupy.cuda.alloc(rng.randrange(1, 600_000)))
    own = allocator.stop_recording()
    assert _requests(hook.events) == _requests(own), f"seed {seed}"
    assert [e.stream for e in hook.events if e.action == "alloc"] == [
        e.stream for e in own if e.action == "alloc"
    ]
    assert isinstance(hook, cupy.cuda.MemoryHook)
    peak = replay(hook.events, AllocatorConfig()).peak_live_bytes
    assert peak == allocator.stats().requested_peak_bytes, f"seed {seed}"


def test_the_line_that_asked_is_noted(backend: HostBackend) -> None:
    with TraceHook(backend=backend) as hook:
        cupy.ndarray((5,), dtype="u1")  # this line
    file, _, line = hook.events[0].note.rpartition(":")
    assert file == __file__
    with open(__file__, encoding="utf-8") as text:
        assert "# this line" in text.readlines()[int(line) - 1]


def test_blocks_from_before_are_not_freed_and_zero_bytes_are_nothing(backend: HostBackend) -> None:
    before = cupy.ndarray((5,), dtype="u1")
    with TraceHook(backend=backend) as hook:
        del before
        cupy.ndarray((0,), dtype="u1")
        kept = cupy.ndarray((7,), dtype="u1")
    del kept
    assert _requests(hook.events) == [("alloc", 7)]


def test_a_failed_request_is_in_the_trace(backend: HostBackend) -> None:
    with TraceHook(backend=backend) as hook, pytest.raises(MemoryError):
        cupy.ndarray((65 * MIB,), dtype="u1")
    assert _requests(hook.events) == [("alloc", 65 * MIB), ("free", 0)]
    assert replay(hook.events, AllocatorConfig(), 64 * MIB).oom is not None


def test_threads_are_recorded_when_all_are_asked_for(backend: HostBackend) -> None:
    def work() -> None:
        cupy.ndarray((5,), dtype="u1")

    for all_threads, count in ((False, 2), (True, 8)):
        with TraceHook(all_threads=all_threads, backend=backend) as hook:
            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
                thread.join(60)
            work()
        assert len(hook.events) == count
        after = threading.Thread(target=work)
        after.start()
        after.join(60)
        assert len(hook.events) == count, "the recording has ended"
    # One thread after the other may have the same identity.
    assert {event.thread for event in hook.events} >= {0, 1}
    assert threading.getprofile() is None


def test_entering_twice_is_refused_as_by_cupy_and_marks_are_kept(backend: HostBackend) -> None:
    with TraceHook(backend=backend) as hook:
        kept = cupy.ndarray((5,), dtype="u1")
        hook.mark("step 1")
        with pytest.raises(KeyError, match="already exists"):
            hook.__enter__()
    assert kept.nbytes == 5
    assert [(e.action, e.note) for e in hook.events[1:]] == [("mark", "step 1")]
    hook.traces[3] = []
    with pytest.raises(AllocError, match=r"devices \[0, 3\]"):
        _ = hook.events


def test_a_mark_before_the_first_allocation_begins_each_trace(backend: HostBackend) -> None:
    with TraceHook(backend=backend) as hook:
        hook.mark("step 1")
        kept = cupy.ndarray((5,), dtype="u1")
        hook.mark("step 2")
    assert kept.nbytes == 5
    assert [(e.action, e.note) for e in hook.events if e.action == "mark"] == [
        ("mark", "step 1"),
        ("mark", "step 2"),
    ]
    assert hook.events[1].action == "alloc"


def test_the_hook_is_imported_without_cupy() -> None:
    code = "import sys, gpu_alloc.cupy; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_cupys_own_pool_is_recorded() -> None:
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), TraceHook() as hook:
        array = cupy.ndarray((3 * MIB,), dtype="u1")
        with cupy.cuda.Stream(non_blocking=True) as stream:
            other = cupy.ndarray((1000,), dtype="u1")
        del array
    assert _requests(hook.events) == [("alloc", 3 * MIB), ("alloc", 1000), ("free", 0)]
    assert [hook.events[0].stream, hook.events[1].stream] == [0, stream.ptr]
    assert other.nbytes == 1000

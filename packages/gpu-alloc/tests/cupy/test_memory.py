"""The memory objects of a pool, on host memory: what the short way of a block may not lose."""

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc import AllocatorConfig, HostSource, check_snapshot  # noqa: E402
from gpu_alloc.cupy import CupyBackend, CupyPool, HostBackend  # noqa: E402
from gpu_alloc.sources import StreamEvents  # noqa: E402

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 511, 512, 513, 100_000, np.int64(1000), True])
def test_a_block_is_cupys_memory_of_the_padded_size(size: Any) -> None:
    pool = CupyPool(AllocatorConfig(), backend=HostBackend())
    for _ in range(2):  # from a new chunk, and from one that is there
        pointer = pool.malloc(size)
        assert isinstance(pointer.mem, cupy.cuda.UnownedMemory)
        assert pointer.mem.size == pool.used_bytes() == (int(size) + 511) // 512 * 512
        assert pointer.ptr == pointer.mem.ptr != 0
        del pointer
        assert pool.used_bytes() == 0


@pytest.mark.parametrize("size", [-1, 1.5, "5"])
def test_what_is_no_size_is_refused_with_and_without_a_block_there(size: Any) -> None:
    pool = CupyPool(AllocatorConfig(), backend=HostBackend())
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match="malloc"):
            pool.malloc(size)
        pool.malloc(100)
    assert pool.used_bytes() == 0


def test_a_block_is_freed_by_the_hooks_of_the_thread_that_drops_it() -> None:
    class Counting(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
        name = "Counting"
        freed = 0

        def free_postprocess(self, **facts: int) -> None:
            self.freed += facts["mem_size"]

    pool, hook = CupyPool(AllocatorConfig(), backend=HostBackend()), Counting()
    blocks = [pool.malloc(100), pool.malloc(1000)]

    def drop_with_hook() -> None:
        with hook:
            blocks.pop()

    thread = threading.Thread(target=drop_with_hook)
    thread.start()
    thread.join(60)
    assert (hook.freed, pool.used_bytes()) == (1024, 512)
    blocks.pop()
    assert (hook.freed, pool.used_bytes()) == (1024, 0)


class FirstFails(StreamEvents):
    def __init__(self) -> None:
        self.recorded: list[int] = []

    def record(self, stream: int) -> int:
        self.recorded.append(stream)
        if len(self.recorded) == 1:
            raise RuntimeError(f"stream {stream} is destroyed")
        return 0

    def is_done(self, event: int) -> bool:
        return True

    def wait(self, event: int) -> None:
        raise NotImplementedError

    def is_capturing(self, stream: int) -> bool:
        return False


def test_an_event_that_fails_when_a_block_is_dropped_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = FirstFails()

    class Backend(CupyBackend):
        memory = HostSource()

        def device_id(self) -> int:
            return 0

        def stream(self) -> int:
            return 0

        def source(self, device_id: int) -> HostSource:
            return self.memory

        def total_bytes(self) -> int:
            return 0

        def events(self, device_id: int) -> StreamEvents:
            return events

    pool = CupyPool(AllocatorConfig(), backend=Backend())
    pointer = pool.malloc(3 * MIB)
    pool.allocator().record_stream(pointer.ptr, 22)
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: told.append(str(args.exc_value)))
    del pointer
    monkeypatch.undo()
    assert told == ["stream 22 is destroyed"]
    assert check_snapshot(pool.allocator().snapshot()) == []  # type: ignore[union-attr]
    assert events.recorded == [22, 22]  # until then the block was in use for all that was known
    assert pool.used_bytes() == 0


def test_arrays_that_are_garbage_together_with_their_pool_are_freed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python ends weak references before finalizers: the core outlives the allocator."""
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    sources = []
    for number in range(20):
        backend = HostBackend()
        holder: dict[str, Any] = {"pool": CupyPool(AllocatorConfig(), backend=backend)}
        holder["arrays"] = [holder["pool"].malloc(MIB) for _ in range(number % 5 + 1)]
        holder["itself"] = holder
        sources.append(weakref.ref(backend.source_of_host))
        del backend, holder
        gc.collect()
    CupyPool(AllocatorConfig(), backend=HostBackend()).malloc(1)
    gc.collect()
    assert raised == []
    assert sum(source() is not None for source in sources) <= 1  # the last waits for the next end

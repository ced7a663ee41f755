"""The CuPy adapter, driver-free on host memory; and, marked `gpu`, on a device.

Run as a script, this file leaves arrays alive at interpreter exit (see the test of that).
"""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="the CuPy adapter needs the extra cuda12 or cuda13")

from gpu_alloc import (  # noqa: E402 - cupy decides whether the file is run at all
    AllocatorConfig,
    AllocError,
    HostSource,
    InvalidFreeError,
    LifetimePlan,
    OutOfMemoryError,
    check_snapshot,
)
from gpu_alloc.cupy import CupyBackend, CupyPool, install, uninstall  # noqa: E402
from gpu_alloc.cupy.versions import cuda_version_problem  # noqa: E402
from gpu_alloc.errors import CudaVersionWarning  # noqa: E402
from gpu_alloc.sources import StreamEvents  # noqa: E402

MIB = 1 << 20


class HostBackend(CupyBackend):
    """Two pretended devices whose memory is the host's; device and stream are set by the test."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.sources = [HostSource(capacity_bytes) for _ in range(2)]
        self.current_device = 0
        self.current_stream = 0

    def device_id(self) -> int:
        return self.current_device

    def stream(self) -> int:
        return self.current_stream

    def source(self, device_id: int) -> HostSource:
        return self.sources[device_id]

    def total_bytes(self) -> int:
        return 64 * MIB

    def bytes_of(self, array: Any) -> memoryview:
        return self.sources[array.data.device_id].view(array.data.ptr, array.nbytes)


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    made = HostBackend()
    install(AllocatorConfig(), backend=made)
    yield made
    gc.collect()
    uninstall()


class RecordingHook(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
    name = "RecordingHook"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, int]]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.endswith("process"):
            calls = object.__getattribute__(self, "calls")
            return lambda **facts: calls.append((name, facts))
        return object.__getattribute__(self, name)


def test_arrays_live_in_the_pool_and_leave_it_with_their_last_view(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    array = cupy.ndarray((1000,), dtype="f4")
    view = array[10:20]
    assert pool.used_bytes() == 4096
    assert array.data.ptr % 512 == 0
    backend.bytes_of(array)[:4] = b"real"
    assert bytes(backend.bytes_of(array)[:4]) == b"real"
    del array
    assert pool.used_bytes() == 4096
    del view
    assert pool.used_bytes() == 0
    assert pool.n_free_blocks() == 1
    assert pool.free_bytes() == pool.total_bytes() == 2 * MIB
    pool.free_all_blocks()
    assert pool.total_bytes() == backend.sources[0].used_bytes == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty_arrays_take_nothing(backend: HostBackend, shape: tuple[int, ...]) -> None:
    array = cupy.ndarray(shape, dtype="f8")
    assert array.data.ptr == 0
    del array
    assert backend.sources[0].used_bytes == 0


def test_block_returns_to_the_stream_that_allocated_it(backend: HostBackend) -> None:
    backend.current_stream = 11
    array = cupy.ndarray((MIB,), dtype="u1")
    address = array.data.ptr
    backend.current_stream = 22
    del array
    assert cupy.ndarray((MIB,), dtype="u1").data.ptr != address
    backend.current_stream = 11
    assert cupy.ndarray((MIB,), dtype="u1").data.ptr == address


def test_each_device_has_its_own_memory_and_limit(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    pool.set_limit(4 * MIB)
    first = cupy.ndarray((100,), dtype="u1")
    backend.current_device = 1
    second = cupy.ndarray((3 * MIB,), dtype="u1")
    assert (first.data.device_id, second.data.device_id) == (0, 1)
    assert pool.get_limit() == 0
    assert backend.sources[1].used_bytes == 3 * MIB
    assert pool.stats().large.num_live_blocks == 1
    backend.current_device = 0
    assert pool.get_limit() == 4 * MIB


def test_limit_takes_bytes_or_a_fraction(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    pool.set_limit(fraction=0.25)
    assert pool.get_limit() == 16 * MIB
    pool.set_limit(size=0)
    assert pool.get_limit() == 0
    for wrong in ({}, {"size": 1, "fraction": 0.5}, {"fraction": 1.5}, {"size": -1}):
        with pytest.raises(ValueError, match=r"exactly one|outside|negative"):
            pool.set_limit(**wrong)
    assert backend.sources[0].used_bytes == 0


def test_out_of_memory_is_ours_and_cupys(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    pool.set_limit(2 * MIB)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="remedy: ") as caught:
        cupy.ndarray((3 * MIB,), dtype="u1")
    assert isinstance(caught.value, OutOfMemoryError)
    assert caught.value.report.requested_bytes == 3 * MIB
    assert cupy.ndarray((100,), dtype="u1").data.ptr
    assert backend.sources[0].used_bytes == 2 * MIB


def test_cyclic_garbage_is_collected_before_out_of_memory(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    pool.set_limit(4 * MIB)
    gc.disable()
    try:
        cycle: list[Any] = [cupy.ndarray((4 * MIB,), dtype="u1")]
        cycle.append(cycle)
        del cycle
        assert cupy.ndarray((4 * MIB,), dtype="u1").nbytes == 4 * MIB
    finally:
        gc.enable()
    assert backend.sources[0].used_bytes == 4 * MIB


def test_hooks_are_called_as_by_cupys_own_pool(backend: HostBackend) -> None:
    hook = RecordingHook()
    with hook:
        array = cupy.ndarray((100,), dtype="u1")
        address = array.data.ptr
        del array
    names = [name for name, _ in hook.calls]
    assert names == [
        "malloc_preprocess",
        "alloc_preprocess",
        "alloc_postprocess",
        "malloc_postprocess",
        "free_preprocess",
        "free_postprocess",
    ]
    facts = dict(hook.calls)
    assert facts["malloc_preprocess"] == {"device_id": 0, "size": 100, "mem_size": 512}
    chunk = facts["alloc_postprocess"].pop("mem_ptr")
    assert chunk <= address < chunk + 2 * MIB
    assert facts["alloc_postprocess"] == {"device_id": 0, "mem_size": 2 * MIB}
    identity = facts["malloc_postprocess"]["pmem_id"]
    assert facts["malloc_postprocess"] == {
        "device_id": 0,
        "size": 100,
        "mem_size": 512,
        "mem_ptr": address,
        "pmem_id": identity,
    }
    assert facts["free_postprocess"] == facts["free_preprocess"]
    assert facts["free_preprocess"] == {
        "device_id": 0,
        "mem_size": 512,
        "mem_ptr": address,
        "pmem_id": identity,
    }
    assert backend.sources[0].used_bytes == 2 * MIB


def test_failed_malloc_ends_its_hooks_with_null(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    pool.set_limit(1000)
    hook = RecordingHook()
    with hook, pytest.raises(MemoryError):
        cupy.ndarray((100,), dtype="u1")
    assert hook.calls[-1][0] == "malloc_postprocess"
    assert (hook.calls[-1][1]["mem_ptr"], hook.calls[-1][1]["pmem_id"]) == (0, 0)
    assert backend.sources[0].used_bytes == 0


def test_a_hook_that_raises_loses_neither_block_nor_chunk(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RaisingHook(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
        name = "RaisingHook"

        def __init__(self, where: str) -> None:
            self.where = where

        def __getattribute__(self, name: str) -> Any:
            if name == object.__getattribute__(self, "where"):
                raise RuntimeError(f"hook failed in {name}")
            return object.__getattribute__(self, name)

    pool = cupy.cuda.get_allocator().__self__
    for where in ("malloc_preprocess", "malloc_postprocess", "alloc_preprocess"):
        pool.free_all_blocks()
        with RaisingHook(where), pytest.raises(RuntimeError, match=where):
            cupy.ndarray((100,), dtype="u1")
        assert pool.used_bytes() == 0, where
    pool.free_all_blocks()
    with RaisingHook("alloc_postprocess"), pytest.raises(RuntimeError, match="alloc_post"):
        cupy.ndarray((100,), dtype="u1")
    assert backend.sources[0].used_bytes == 0
    for where in ("free_preprocess", "free_postprocess"):
        array = cupy.ndarray((100,), dtype="u1")
        seen: list[str] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda args: seen.append(str(args.exc_value)))  # noqa: B023
        with RaisingHook(where):
            del array
        monkeypatch.undo()
        assert seen == [f"hook failed in {where}"]
        assert pool.used_bytes() == 0, where


@pytest.mark.parametrize("name", ["free_all_blocks", "free_all_free"])
def test_idle_memory_is_given_back_under_both_names(backend: HostBackend, name: str) -> None:
    pool = cupy.cuda.get_allocator().__self__
    cupy.ndarray((100,), dtype="u1")
    assert backend.sources[0].used_bytes == 2 * MIB
    getattr(pool, name)()
    assert backend.sources[0].used_bytes == 0


def test_idle_memory_of_one_stream_is_given_back(backend: HostBackend) -> None:
    pool = cupy.cuda.get_allocator().__self__
    for stream in (11, 22):
        backend.current_stream = stream
        cupy.ndarray((3 * MIB,), dtype="u1")
    pool.free_all_blocks(stream=SimpleNamespace(ptr=11))
    assert backend.sources[0].used_bytes == 3 * MIB
    assert pool.n_free_blocks() == 1
    pool.free_all_blocks(stream=None)
    assert backend.sources[0].used_bytes == 0


def test_cupys_debug_hook_works(backend: HostBackend, capsys: pytest.CaptureFixture[str]) -> None:
    with cupy.cuda.memory_hooks.DebugPrintHook(file=sys.stdout):
        cupy.ndarray((100,), dtype="u1")
    assert capsys.readouterr().out.count('"hook":') == 3
    assert backend.sources[0].used_bytes == 2 * MIB


def test_arrays_outlive_uninstall_and_their_memory_returns_with_them() -> None:
    backend = HostBackend()
    before = cupy.cuda.get_allocator()
    pool = install(AllocatorConfig(large_pool_pre_alloc_in_mb=2), backend=backend)
    kept = cupy.ndarray((100,), dtype="u1")
    cupy.ndarray((2 * MIB,), dtype="u1")
    assert backend.sources[0].used_bytes == 4 * MIB
    uninstall()
    assert cupy.cuda.get_allocator() is before
    assert backend.sources[0].used_bytes == 2 * MIB
    backend.bytes_of(kept)[:] = bytes(100)
    del kept
    assert backend.sources[0].used_bytes == 0
    with pytest.raises(AllocError, match="after close"):
        pool.malloc(1)


def test_install_and_uninstall_refuse_to_lose_an_allocator() -> None:
    with pytest.raises(AllocError, match=r"call install\(\) first"):
        uninstall()
    before = cupy.cuda.get_allocator()
    pool = install(AllocatorConfig(), backend=HostBackend())
    installed = cupy.cuda.get_allocator()
    with pytest.raises(AllocError, match=r"call uninstall\(\) first"):
        install(AllocatorConfig(), backend=HostBackend())
    cupy.cuda.set_allocator(before)
    with pytest.raises(AllocError, match="changed after install"):
        uninstall()
    cupy.cuda.set_allocator(installed)
    uninstall()
    assert cupy.cuda.get_allocator() is before
    assert pool.used_bytes() == 0


def test_install_that_fails_changes_nothing() -> None:
    before = cupy.cuda.get_allocator()
    with cupy.cuda.using_allocator(before), pytest.raises(ValueError, match="using_allocator"):
        install(AllocatorConfig(), backend=HostBackend())
    assert cupy.cuda.get_allocator() is before
    install(AllocatorConfig(), backend=HostBackend())
    uninstall()


def test_what_has_no_room_is_cupys_error_and_leaves_nothing_behind() -> None:
    backend = HostBackend(250 * MIB)
    plan = LifetimePlan(places=((200 * MIB, 0, 0),), alignment_size=512)
    pool = CupyPool(AllocatorConfig(large_pool_pre_alloc_in_mb=100), backend=backend, plan=plan)
    for _ in range(2):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            pool.malloc(1000)
        assert backend.sources[0].used_bytes == 0
    whole = AllocatorConfig(large_pool_pre_alloc_in_mb=300)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        CupyPool(whole, backend=backend).malloc(1000)


def test_pool_serves_one_thread_through_using_allocator() -> None:
    backend = HostBackend()
    pool = CupyPool(AllocatorConfig(), backend=backend)
    before = cupy.cuda.get_allocator()
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.ndarray((5,), dtype="u1")
    assert cupy.cuda.get_allocator() is before
    assert pool.used_bytes() == 512
    with pytest.raises(InvalidFreeError):
        pool.allocator(0).free(array.data.ptr + 512)


def test_threads_make_and_drop_arrays(backend: HostBackend) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        for round_ in range(200):
            array = cupy.ndarray((1000 + 997 * (round_ % 7),), dtype="u1")
            view = backend.bytes_of(array)
            view[:] = bytes([number]) * array.nbytes
            if bytes(view) != bytes([number]) * array.nbytes:
                failures.append(f"thread {number}, round {round_}")
            view.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    pool = cupy.cuda.get_allocator().__self__
    assert pool.used_bytes() == 0
    assert check_snapshot(pool.allocator(0).snapshot()) == []


def test_interpreter_exit_with_living_arrays_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__))],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_cuda_majors_are_compared() -> None:
    assert cuda_version_problem(12090, "12.4") is None
    assert cuda_version_problem(13000, "13.2") is None
    assert cuda_version_problem(12090, None) is None
    problem = cuda_version_problem(12090, "13.2")
    assert problem is not None
    assert "gpu-alloc[cuda13]" in problem


def test_differing_cuda_majors_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    strange = SimpleNamespace(version=SimpleNamespace(cuda="99.1"))
    monkeypatch.setitem(sys.modules, "torch", strange)
    with pytest.warns(CudaVersionWarning, match="torch for CUDA 99"):
        CupyPool(AllocatorConfig(), backend=HostBackend())
    CupyPool(AllocatorConfig(), backend=HostBackend())


def test_the_adapter_is_imported_without_cupy() -> None:
    code = "import sys, gpu_alloc.cupy_memory; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_array_used_on_another_stream_is_kept_until_its_work_is_done() -> None:
    class Events(StreamEvents):
        done = False

        def record(self, stream: int) -> int:
            return stream

        def is_done(self, event: int) -> bool:
            assert event == 22
            return self.done

        def wait(self, event: int) -> None:
            raise AssertionError("there is room")

        def is_capturing(self, stream: int) -> bool:
            return False

    class Backend(HostBackend):
        def events(self, device_id: int) -> StreamEvents:
            return events

    events, backend = Events(), Backend()
    pool = CupyPool(AllocatorConfig(), backend=backend)
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.ndarray((3 * MIB,), dtype="u1")
        address = array.data.ptr
        pool.record_stream(array[100:], SimpleNamespace(ptr=22))
        del array
        assert cupy.ndarray((3 * MIB,), dtype="u1").data.ptr != address
        events.done = True
        assert cupy.ndarray((3 * MIB,), dtype="u1").data.ptr == address
        pool.record_stream(cupy.ndarray((0,), dtype="u1"), SimpleNamespace(ptr=22))  # of no bytes
        with pytest.raises(AllocError, match="not allocated here"):
            pool.allocator().record_stream(address + 1, 22)


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_an_array_used_on_another_stream_is_kept_until_its_work_is_done() -> None:
    pool = CupyPool(AllocatorConfig())
    other = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(20):
            array = cupy.ndarray((64 * MIB,), dtype="u1")
            array.fill(7)
            cupy.cuda.get_current_stream().synchronize()
            with other:
                copies = [array.copy() for _ in range(8)]
            pool.record_stream(array, other)
            del array
            cupy.ndarray((64 * MIB,), dtype="u1").fill(9)
            other.synchronize()
            assert all(int(copy.min()) == int(copy.max()) == 7 for copy in copies)
            del copies
    assert check_snapshot(pool.allocator().snapshot()) == []


@pytest.fixture
def cuda_pool() -> Iterator[CupyPool]:
    pool = install(AllocatorConfig(small_pool_pre_alloc_in_mb=2))
    yield pool
    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    uninstall()


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_arrays_keep_their_values_and_memory_is_reused(cuda_pool: CupyPool) -> None:
    rng = np.random.default_rng()
    host = [rng.random(size) for size in (1, 1000, 131_072, 1_000_003, 0)]
    device = []
    for values in host:
        array = cupy.ndarray(values.shape, dtype=values.dtype)
        array.set(values)
        device.append(array)
    for values, array in zip(host, device, strict=True):
        np.testing.assert_array_equal(array.get(), values)
    held = cuda_pool.total_bytes()
    assert cuda_pool.used_bytes() >= sum(values.nbytes for values in host)
    del array
    device.clear()
    assert cuda_pool.used_bytes() == 0
    again = [cupy.ndarray(values.shape, dtype=values.dtype) for values in host]
    assert cuda_pool.total_bytes() == held
    assert check_snapshot(cuda_pool.allocator().snapshot()) == []
    del again


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_kernels_run_on_pool_memory(cuda_pool: CupyPool) -> None:
    x = cupy.arange(1_000_000, dtype="f8")
    total = float((x * 2 + 1).sum())
    assert total == 1_000_000.0 * 999_999.0 + 1_000_000.0
    assert cuda_pool.stats().allocated_peak_bytes >= 2 * x.nbytes


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_memory_really_comes_from_and_returns_to_the_driver(cuda_pool: CupyPool) -> None:
    size = 256 * MIB
    free_before, _ = cupy.cuda.runtime.memGetInfo()
    array = cupy.ndarray((size,), dtype="u1")
    free_during, _ = cupy.cuda.runtime.memGetInfo()
    assert free_before - free_during >= size
    del array
    assert cupy.cuda.runtime.memGetInfo()[0] <= free_during + 16 * MIB, "it stays cached"
    cuda_pool.free_all_blocks()
    assert cupy.cuda.runtime.memGetInfo()[0] >= free_before - 16 * MIB
    assert cuda_pool.total_bytes() == 2 * MIB, "the pre-allocation stays"


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_streams_do_not_reuse_each_others_blocks(cuda_pool: CupyPool) -> None:
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with first:
        array = cupy.ndarray((4 * MIB,), dtype="u1")
        array.data.memset_async(7, array.nbytes, first)
    address = array.data.ptr
    with second:
        del array
        other = cupy.ndarray((4 * MIB,), dtype="u1")
        assert other.data.ptr != address
    with first:
        reused = cupy.ndarray((4 * MIB,), dtype="u1")
        assert reused.data.ptr == address
        values = reused.get(stream=first)
        first.synchronize()
    assert values.min() == values.max() == 7
    assert cuda_pool.stats().large.num_live_blocks == 2


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_per_thread_default_streams_are_kept_apart(cuda_pool: CupyPool) -> None:
    addresses: list[int] = []

    def work() -> None:
        with cupy.cuda.Stream.ptds:
            array = cupy.ndarray((4 * MIB,), dtype="u1")
            addresses.append(array.data.ptr)
            del array
            addresses.append(cupy.ndarray((4 * MIB,), dtype="u1").data.ptr)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]
    assert addresses[0] != addresses[2]
    assert cuda_pool.used_bytes() == 0


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_limit_and_real_exhaustion_raise_cupys_error(cuda_pool: CupyPool) -> None:
    cuda_pool.set_limit(fraction=0.01)
    limit = cuda_pool.get_limit()
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="exceeds the limit"):
        cupy.ndarray((limit + 1,), dtype="u1")
    cuda_pool.set_limit(0)
    _, total = cupy.cuda.runtime.memGetInfo()
    with pytest.raises(OutOfMemoryError, match="larger device"):
        cupy.ndarray((2 * total,), dtype="u1")
    array = cupy.ndarray((1000,), dtype="u1")
    array.set(np.arange(1000, dtype="u1"))
    np.testing.assert_array_equal(array.get(), np.arange(1000, dtype="u1"))


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_hooks_see_device_and_pool(cuda_pool: CupyPool) -> None:
    hook = RecordingHook()
    with hook:
        array = cupy.ndarray((8 * MIB,), dtype="u1")
        del array
    names = [name for name, _ in hook.calls]
    assert names[:2] == ["malloc_preprocess", "alloc_preprocess"]
    assert names[-2:] == ["free_preprocess", "free_postprocess"]
    assert cuda_pool.used_bytes() == 0


@pytest.mark.gpu(needs="runtime for CuPy")
def test_gpu_arrays_outlive_uninstall() -> None:
    pool = install(AllocatorConfig())
    array = cupy.ndarray((1000,), dtype="i8")
    array.set(np.arange(1000))
    uninstall()
    np.testing.assert_array_equal(array.get(), np.arange(1000))
    assert pool.total_bytes() > 0
    del array
    assert pool.total_bytes() == 0


if __name__ == "__main__":
    install(AllocatorConfig(free_idle_chunk=True), backend=HostBackend())
    arrays = [cupy.ndarray((size,), dtype="u1") for size in (10, MIB, 5 * MIB)]
    cyclic: list[Any] = [cupy.ndarray((10,), dtype="u1")]
    cyclic.append(cyclic)
    print("alive")

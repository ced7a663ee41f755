"""What is the compiled core's own; what both cores do is held by tests/core."""

import ctypes
import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from gpu_alloc import (
    AddressSource,
    AllocatorConfig,
    HostSource,
    OutOfMemoryError,
    TwoPoolAllocator,
)
from gpu_alloc.native import NativeAllocator, NativeUnavailableError, native_library

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _compiled() -> None:
    try:
        native_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no compiled core: {error}")


def test_it_has_every_method_of_the_python_core() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(TwoPoolAllocator) <= public(NativeAllocator)


def test_numbers_that_only_count_as_integers_are_taken() -> None:
    class Whole:
        def __index__(self) -> int:
            return 1000

    allocator = NativeAllocator(AddressSource(), AllocatorConfig())
    assert allocator.malloc(Whole()).size == 1024  # type: ignore[arg-type]
    assert allocator.malloc(1000, Whole()).size == 1024  # type: ignore[arg-type]
    assert allocator.malloc(True).size == 512


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 63) + 5, 1 << 80])
def test_sizes_beyond_c_are_refused_with_their_number(nbytes: int) -> None:
    allocator = NativeAllocator(AddressSource(1 << 40), AllocatorConfig())
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(nbytes)
    assert caught.value.report.requested_bytes == nbytes
    assert allocator.malloc(8).size == 512


def test_streams_are_named_by_any_number_of_64_bits() -> None:
    allocator = NativeAllocator(AddressSource(), AllocatorConfig())
    names = [-(2**62), -1, 0, 2**62]
    ptrs = [allocator.malloc(8, name).ptr for name in names]
    of_ptr = {b.ptr: b.stream for c in allocator.snapshot().chunks for b in c.blocks}
    assert [of_ptr[ptr] for ptr in ptrs] == names


def test_memory_is_real_and_survives_the_allocator_of_a_block() -> None:
    source = HostSource()
    allocator = NativeAllocator(source, AllocatorConfig())
    ptr, size = allocator.malloc(5 * MIB)
    source.view(ptr, size)[:5] = b"hello"
    assert ctypes.string_at(ptr, 5) == b"hello"


def test_a_run_places_as_the_calls_do_and_stops_where_memory_ends() -> None:
    rows = array("q", [0, 0, 3 * MIB, 0, 0, 1, 1000, 7, 1, 0, 0, 0, 0, 2, 0, 0, 0, 3, 9 * MIB, 0])
    config = AllocatorConfig()
    found = NativeAllocator.on_invented_addresses(
        config, capacity_bytes=8 * MIB, granularity_bytes=2 * MIB
    )
    assert found.run(rows, (ctypes.c_int64 * 4)()) == 4
    expected = TwoPoolAllocator(AddressSource(8 * MIB), config)
    first = expected.malloc(3 * MIB)
    expected.malloc(1000, 7)
    expected.free(first.ptr)
    expected.malloc(0)
    with pytest.raises(OutOfMemoryError) as caught:
        expected.malloc(9 * MIB)
    assert found.snapshot().chunks == expected.snapshot().chunks
    report = found.last_report()
    assert report is not None
    assert report.message() == caught.value.report.message()


def test_a_block_that_is_found_while_a_callback_raises_is_given_back() -> None:
    class InterruptedOnce(AddressSource):
        calls = 0

        def acquire(self, size_bytes: int) -> int | None:
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt
            return super().acquire(size_bytes)

    allocator = NativeAllocator(InterruptedOnce(), AllocatorConfig())
    with pytest.raises(KeyboardInterrupt):
        allocator.malloc(3 * MIB)
    assert allocator.stats().allocated_bytes == 0


def test_a_device_of_more_bytes_than_there_are_numbers_has_no_end() -> None:
    allocator = NativeAllocator(AddressSource(1 << 64), AllocatorConfig())
    assert allocator.malloc(MIB).size == MIB


def test_cores_call_cuda_on_their_own_device_and_end_no_capture() -> None:
    program = Path(__file__).parents[1] / "torch" / "arena_on_fakes.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["unused"], facts["used"]) == ([], [1])
    names = {name for name, _, _ in facts["calls"]}
    assert names == {"malloc", "free", "record", "query", "is_capturing", "destroy"}
    assert {(device, mode) for _, device, mode in facts["calls"]} == {(1, 2)}
    assert facts["after"] == [0, 0]
    assert facts["marks"] == ["a", "b"]
    assert [facts[f"reused{of}"] for of in ("_unrecorded", "_unwaited", "")] == [False, False, True]


def test_what_a_callback_raises_is_raised_by_whatever_is_asked_next() -> None:
    class Interrupted(AddressSource):
        def release(self, ptr: int, size_bytes: int) -> None:
            super().release(ptr, size_bytes)
            raise KeyboardInterrupt

    for ask in ("totals", "snapshot", "plan_use", "last_report", "stats"):
        allocator = NativeAllocator(Interrupted(), AllocatorConfig(free_idle_chunk=True))
        ptr = allocator.malloc(3 * MIB).ptr
        allocator.try_free(ptr)  # says nothing itself
        with pytest.raises(KeyboardInterrupt):
            getattr(allocator, ask)()
        getattr(allocator, ask)()

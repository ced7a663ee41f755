import pickle

import pytest

from gpu_alloc import AddressSource, AllocatorConfig, OutOfMemoryError, TwoPoolAllocator
from gpu_alloc.core.oom import format_bytes

MIB = 1 << 20


def _failure(allocator, nbytes, stream=0):
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(nbytes, stream)
    return caught.value


def test_report_holds_the_numbers():
    allocator = TwoPoolAllocator(AddressSource(8 * MIB), AllocatorConfig())
    allocator.malloc(100)
    allocator.malloc(3 * MIB)
    report = _failure(allocator, 5 * MIB + 1, stream=9).report
    assert (report.requested_bytes, report.padded_bytes) == (5 * MIB + 1, 5 * MIB + 512)
    assert (report.pool, report.stream, report.limit_bytes) == ("large", 9, 0)
    assert report.stats.allocated_bytes == 3 * MIB + 512
    assert report.stats.reserved_bytes == 6 * MIB
    text = report.message()
    for part in (
        "5243392 bytes",
        "reserved 6.00 MiB",
        "512 B in 1 blocks",
        "stream 9",
        "larger device",
    ):
        assert part in text


def test_fragmentation_is_named_with_the_way_to_settings():
    allocator = TwoPoolAllocator(
        AddressSource(8 * MIB), AllocatorConfig(large_pool_pre_alloc_in_mb=8)
    )
    blocks = [allocator.malloc(2 * MIB) for _ in range(4)]
    allocator.free(blocks[0].ptr)
    allocator.free(blocks[2].ptr)
    report = _failure(allocator, 3 * MIB).report
    assert report.stats.fragmentation == 0.5
    assert "fragmented: 4.00 MiB are free but the largest place is 2.00 MiB" in report.remedy()
    assert "gpu-alloc explain" in report.remedy()
    assert "pre_alloc" not in report.remedy(), "a setting that nobody replayed"


def test_memory_of_other_streams_is_named():
    allocator = TwoPoolAllocator(
        AddressSource(8 * MIB), AllocatorConfig(large_pool_pre_alloc_in_mb=8)
    )
    freed = allocator.malloc(6 * MIB, stream=1)
    allocator.malloc(2 * MIB, stream=1)
    allocator.free(freed.ptr)
    report = _failure(allocator, 4 * MIB, stream=2).report
    assert report.usable_bytes == 0
    assert "6.00 MiB are free but belong to other streams" in report.remedy()


@pytest.mark.parametrize(
    ("nbytes", "said"), [(10 * MIB, "alone exceeds the limit"), (3 * MIB, "reserved exceeds")]
)
def test_limit_is_named(nbytes, said):
    allocator = TwoPoolAllocator(AddressSource(), AllocatorConfig(memory_limit_in_mb=8))
    allocator.malloc(6 * MIB)
    assert said in _failure(allocator, nbytes).report.remedy()


def test_error_is_a_memory_error_and_can_be_pickled():
    error = _failure(TwoPoolAllocator(AddressSource(0), AllocatorConfig()), 1)
    assert isinstance(error, MemoryError)
    copy = pickle.loads(pickle.dumps(error))
    assert copy.report == error.report
    assert str(copy) == str(error)


def test_sizes_are_readable():
    values = [0, 1023, 1024, 1536, 1 << 20, 3 << 30, 1 << 60]
    assert [format_bytes(v) for v in values] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "3.00 GiB",
        "1024.00 PiB",
    ]

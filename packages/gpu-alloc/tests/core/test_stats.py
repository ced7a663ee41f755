from gpu_alloc import Stats
from gpu_alloc.core.stats import PoolStats


def test_totals_are_sums_and_the_peak_is_not_the_sum_of_peaks():
    small = PoolStats(allocated_bytes=1, requested_bytes=1, reserved_bytes=5, largest_free_bytes=4)
    large = PoolStats(allocated_bytes=2, requested_bytes=1, reserved_bytes=8, largest_free_bytes=2)
    stats = Stats(small=small, large=large, reserved_peak_bytes=13)
    assert (stats.allocated_bytes, stats.requested_bytes, stats.reserved_bytes) == (3, 2, 13)
    assert stats.free_bytes == 10
    assert stats.fragmentation == 0.6


def test_nothing_free_is_not_fragmented():
    full = PoolStats(allocated_bytes=4, reserved_bytes=4)
    assert full.fragmentation == 0.0
    assert Stats(small=full, large=PoolStats()).fragmentation == 0.0

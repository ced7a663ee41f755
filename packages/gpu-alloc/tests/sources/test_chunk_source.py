import ctypes
import os

import pytest

from gpu_alloc import AddressSource, HostSource


@pytest.mark.parametrize("make", [AddressSource, HostSource])
def test_capacity_is_kept_and_comes_back(make):
    source = make(1 << 22)
    first = source.acquire(1 << 21)
    second = source.acquire(1 << 21)
    assert abs(first - second) >= 1 << 21
    assert source.acquire(4096) is None
    source.release(first, 1 << 21)
    assert source.used_bytes == 1 << 21
    third = source.acquire(1 << 21)
    assert third % source.alignment_bytes == 0


@pytest.mark.parametrize("make", [AddressSource, HostSource])
def test_release_of_what_is_not_out_is_refused(make):
    source = make()
    ptr = source.acquire(1 << 21)
    with pytest.raises(ValueError, match="whole"):
        source.release(ptr, 1 << 20)
    source.release(ptr, 1 << 21)
    with pytest.raises(ValueError, match="once"):
        source.release(ptr, 1 << 21)
    assert source.used_bytes == 0


@pytest.mark.parametrize("make", [AddressSource, HostSource])
def test_negative_capacity_is_refused(make):
    with pytest.raises(ValueError, match="negative"):
        make(-1)


def test_granularity_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="power of two"):
        AddressSource(granularity_bytes=3000)


def test_invented_addresses_are_never_used_twice():
    source = AddressSource()
    seen = set()
    for _ in range(10):
        ptr = source.acquire(1)
        assert ptr not in seen
        seen.add(ptr)
        source.release(ptr, 1)


def test_host_memory_is_real_shared_and_zeroed():
    source = HostSource()
    ptr = source.acquire(8192)
    view = source.view(ptr + 100, 8)
    assert bytes(view) == bytes(8)
    view[:] = b"written!"
    assert ctypes.string_at(ptr + 100, 8) == b"written!"


def test_view_outlives_the_release_of_its_chunk():
    source = HostSource()
    ptr = source.acquire(4096)
    view = source.view(ptr, 4)
    view[:] = b"kept"
    source.release(ptr, 4096)
    assert bytes(view) == b"kept"
    with pytest.raises(ValueError, match="not inside one chunk"):
        source.view(ptr, 4)


def test_view_must_lie_inside_a_chunk():
    source = HostSource()
    ptr = source.acquire(4096)
    for start, size in ((ptr - 1, 2), (ptr, 4097), (ptr + 4096, 1), (ptr, -1)):
        with pytest.raises(ValueError, match="not inside one chunk"):
            source.view(start, size)
    assert source.view(ptr + 4096, 0).nbytes == 0


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70])
def test_more_than_the_system_has_is_no_room(nbytes):
    assert HostSource().acquire(nbytes) is None


def test_the_hosts_memory_comes_in_pages_or_in_multiples_of_them() -> None:
    assert HostSource(granularity_bytes=2 << 20).granularity_bytes == 2 << 20
    for wrong in (0, 100, -4096):
        with pytest.raises(ValueError, match=f"granularity_bytes={wrong} is not of whole pages"):
            HostSource(granularity_bytes=wrong)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_writes_into_memory_of_its_own():
    source = HostSource()
    ptr = source.acquire(4096)
    ctypes.memset(ptr, 1, 1)
    child = os.fork()
    if child == 0:
        ctypes.memset(ptr, 2, 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(ptr, 1) == b"\x01"

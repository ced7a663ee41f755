"""Pages of a device: on devicetest's stub of the driver, and on a GPU."""

import json
from pathlib import Path

import pytest

from gpu_alloc.errors import AllocError
from gpu_alloc.sources import CudaSource

PROGRAM = str(Path(__file__).with_name("pages_on_stub.py"))


def test_pages_come_and_go_behind_addresses_and_an_allocator_lives_on_them() -> None:
    stub = pytest.importorskip("devicetest.cuda_stub")
    try:
        done = stub.run_on_stub(PROGRAM, gpu_bytes=16 << 20)
    except stub.StubUnavailableError as error:
        pytest.skip(f"no stub of CUDA here: {error}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    refused = found["pages"].pop("refused")
    assert refused.startswith("cuMemMap on device 0 ended with CUDA's error 1; where the device")
    assert found["pages"] == {
        "aligned": True,
        "maps": True,
        "more_than_there_is": False,  # and nothing of it stays
        "the_rest": True,
        "kept": True,
        "waits_of_unmap": 1,
        "elsewhere": True,
        "first_and_last": True,
    }
    for core in ("python", "native"):
        facts = found[core]
        assert facts["kept"]
        assert facts["out_of_memory"].startswith("out of memory: 8.00 MiB")
        assert facts["reserved"] == 0


@pytest.mark.gpu(needs="driver for pages")
def test_gpu_pages_are_mapped_written_and_given_back() -> None:
    cupy = pytest.importorskip("cupy")
    source = CudaSource.in_pages(0)
    start = source.acquire(8 << 20)
    assert start is not None
    assert source.map(start + (2 << 20), 4 << 20)
    cupy.cuda.runtime.memset(start + (2 << 20), 7, 4 << 20)
    source.unmap(start + (2 << 20), 4 << 20)
    assert source.map(start, 2 << 20)
    cupy.cuda.runtime.memset(start, 7, 2 << 20)
    source.unmap(start, 2 << 20)
    with pytest.raises(AllocError, match="cuMemMap"):
        source.map(start + (6 << 20), 4 << 20)  # half of it is not of these addresses
    assert source.map(start + (6 << 20), 2 << 20)  # nothing stayed of the refused half
    source.unmap(start + (6 << 20), 2 << 20)
    source.release(start, 8 << 20)
    with pytest.raises(AllocError, match="cuMemMap on device 0 ended with CUDA's error 1"):
        source.map(start, 2 << 20)  # an address that is reserved no more


@pytest.mark.gpu(needs="driver for pages")
def test_gpu_pages_that_the_card_has_no_room_for_leave_none_behind() -> None:
    cupy = pytest.importorskip("cupy")
    source = CudaSource.in_pages(0)
    start = source.acquire(1 << 30)
    assert start is not None
    free_bytes, _ = cupy.cuda.runtime.memGetInfo()
    taken = cupy.cuda.runtime.malloc(free_bytes - (256 << 20))
    before, _ = cupy.cuda.runtime.memGetInfo()
    assert not source.map(start, 1 << 30)
    assert cupy.cuda.runtime.memGetInfo()[0] == before
    assert source.map(start, 2 << 20)
    source.unmap(start, 2 << 20)
    cupy.cuda.runtime.free(taken)
    source.release(start, 1 << 30)

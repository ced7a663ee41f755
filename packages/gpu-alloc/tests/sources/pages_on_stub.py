"""What `CudaPagedSource` does with the driver of devicetest's stub, on a device of 16 MiB.

Prints one JSON object of facts; test_cuda_pages.py says what they must be.
"""

import ctypes
import json
from typing import Any

from gpu_alloc import AllocatorConfig, AllocError, OutOfMemoryError, TwoPoolAllocator
from gpu_alloc.native import NativeAllocator
from gpu_alloc.sources import CudaSource

MIB = 1 << 20
PAGE = 2 * MIB
CONFIG = AllocatorConfig(use_virtual_memory=True, small_pool_size_in_mb=0)


def view(ptr: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(ptr)).cast("B")


def waits() -> int:
    return ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "num_waits").value


def pages() -> dict[str, Any]:
    """The source by itself."""
    source = CudaSource.in_pages(0)
    start = source.acquire(64 * MIB)
    if start is None:
        raise RuntimeError("no addresses")
    facts: dict[str, Any] = {"aligned": start % PAGE == 0, "maps": source.map(start, 4 * PAGE)}
    view(start, 4 * PAGE)[:] = b"x" * (4 * PAGE)
    facts["more_than_there_is"] = source.map(start + 8 * PAGE, 5 * PAGE)
    facts["the_rest"] = source.map(start + 8 * PAGE, 4 * PAGE)
    facts["kept"] = bytes(view(start, 4 * PAGE)) == b"x" * (4 * PAGE)
    before = waits()
    source.unmap(start + PAGE, 2 * PAGE)
    facts["waits_of_unmap"] = waits() - before
    facts["elsewhere"] = source.map(start + 16 * PAGE, 2 * PAGE)
    facts["first_and_last"] = bytes(view(start, 1)) + bytes(view(start + 3 * PAGE, 1)) == b"xx"
    source.unmap(start, 20 * PAGE)
    source.release(start, 64 * MIB)
    try:
        CudaSource.in_pages(0).map(start + 1, PAGE)
        facts["refused"] = ""
    except AllocError as error:
        facts["refused"] = str(error)
    return facts


def pool(kind: type[TwoPoolAllocator] | type[NativeAllocator]) -> dict[str, Any]:
    """An allocator on it: what is free in pieces serves a large block."""
    allocator = kind(CudaSource.in_pages(0), CONFIG)
    blocks = [allocator.malloc(3 * MIB)[0] for _ in range(5)]
    for number, ptr in enumerate(blocks):
        view(ptr, 3 * MIB)[:] = bytes([number]) * (3 * MIB)
    for ptr in blocks[::2]:
        allocator.free(ptr)
    large = allocator.malloc(7 * MIB)[0]
    view(large, 7 * MIB)[:] = b"y" * (7 * MIB)
    kept = all(bytes(view(blocks[n], 3 * MIB)) == bytes([n]) * (3 * MIB) for n in (1, 3))
    try:
        allocator.malloc(8 * MIB)
        ended = ""
    except OutOfMemoryError as error:
        ended = str(error)
    for ptr in (*blocks[1::2], large):
        allocator.free(ptr)
    allocator.close()
    return {"kept": kept, "out_of_memory": ended, "reserved": allocator.stats().reserved_bytes}


if __name__ == "__main__":
    found = {"pages": pages(), "python": pool(TwoPoolAllocator), "native": pool(NativeAllocator)}
    print(json.dumps(found))

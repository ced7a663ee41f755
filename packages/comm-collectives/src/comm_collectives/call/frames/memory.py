"""The memory of a tensor as Python's streams take it, without numpy, which torch can lack.

memory_of(torch.zeros(3, dtype=torch.uint8))     # a memoryview of 3 bytes
"""

import ctypes

import torch

_EMPTY = memoryview(b"")


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, writable; keep the tensor meanwhile."""
    return memory_at(flat.data_ptr(), flat.nbytes)


def memory_at(address: int, length: int) -> memoryview:
    """Return bytes in memory, writable; keep what they are of meanwhile."""
    if not length:
        return _EMPTY
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")

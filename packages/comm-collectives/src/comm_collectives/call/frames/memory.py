"""The memory of a tensor as Python's streams take it, without numpy, which torch can lack.

memory_of(torch.zeros(3, dtype=torch.uint8))     # a memoryview of 3 bytes
"""

import ctypes

import torch

_EMPTY = memoryview(b"")


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, writable; keep the tensor meanwhile."""
    length = flat.nbytes
    if not length:
        return _EMPTY
    return memoryview((ctypes.c_char * length).from_address(flat.data_ptr())).cast("B")

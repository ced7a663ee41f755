"""What is an out-of-memory, whoever had no memory, and how much it had been asked for.

cause = out_of_memory_in(error)            # None: something else
requested_bytes(cause)
"""

import re

import torch

from moe_train.errors import RankOutOfMemoryError

OF_GPU_ALLOC = "std::bad_alloc"
"""All that torch says where gpu-alloc serves it."""

# What torch says in a plain RuntimeError: of that, of the CPU's allocator, of CUDA itself.
_SAID = (OF_GPU_ALLOC, "DefaultCPUAllocator: ", "CUDA error: out of memory")
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """The out-of-memory of this process that an error is or comes of; None if a phase has named it,
    or there is none.
    """
    if isinstance(error, RankOutOfMemoryError):
        return None
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return error
    is_torchs = type(error).__module__ in ("builtins", "torch") and isinstance(error, RuntimeError)
    if is_torchs and any(said in str(error) for said in _SAID):
        return error
    return None if error.__cause__ is None else out_of_memory_in(error.__cause__)


def requested_bytes(error: BaseException) -> int | None:
    """How much was asked for, as torch says it; its two digits where it rounds."""
    found = _REQUEST.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])

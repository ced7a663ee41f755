"""The functions of the CUDA runtime that torch runs on, as addresses for the compiled core.

Invariant: the addresses are of the library that is loaded already, so torch and the core see one
CUDA context.
"""

import ctypes

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.errors import AllocError
from gpu_alloc.native import Arena
from gpu_alloc.torch._torch_private import torch

# The order of the struct `Functions` in native/core.cpp.
_NAMES = (
    "cudaMalloc",
    "cudaFree",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventQuery",
    "cudaEventSynchronize",
    "cudaEventDestroy",
    "cudaStreamIsCapturing",
    "cudaDeviceSynchronize",
    "cudaGetLastError",
)


def open_arena(config: AllocatorConfig | None) -> Arena:
    """The process's arena over CUDA's memory. Raises AllocError when it has other settings, or
    torch has no CUDA.
    """
    return Arena(AllocatorConfig.from_env() if config is None else config, _runtime_functions())


def _runtime_functions() -> list[int | None]:
    version = torch.version.cuda
    if version is None:
        raise AllocError("this torch is built without CUDA; install one with it")
    name = f"libcudart.so.{version.split('.')[0]}"
    # Whatever is in place of the runtime for the whole process comes first: a library that is
    # preloaded stands before the one that torch names.
    for library in (None, name):
        try:
            loaded = ctypes.CDLL(library)
            return [ctypes.cast(getattr(loaded, n), ctypes.c_void_p).value for n in _NAMES]
        except (AttributeError, OSError):
            continue
    raise AllocError(f"{name}, the CUDA runtime that torch is built for, cannot be loaded")

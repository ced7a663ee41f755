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
    "cudaGetDevice",
    "cudaSetDevice",
    "cudaThreadExchangeStreamCaptureMode",
)


# The order of the struct `Driver` there: the driver's, then the runtime's.
_DRIVERS_NAMES = (
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
)
_OF_DEVICES = ("cudaGetDevice", "cudaSetDevice", "cudaDeviceSynchronize")
_FIRST_WITH_THEM = 10_020  # CUDA 10.2


def open_arena(config: AllocatorConfig | None) -> Arena:
    """The process's arena over CUDA's memory. Raises AllocError when it has other settings, or
    torch has no CUDA.
    """
    settings = AllocatorConfig.from_env() if config is None else config
    runtime = _runtime()
    pointers = [_address(runtime, name) for name in _NAMES]
    if not settings.use_virtual_memory:
        return Arena(settings, pointers)
    driver = [_drivers_function(runtime, name) for name in _DRIVERS_NAMES]
    return Arena(settings, pointers, driver + [_address(runtime, name) for name in _OF_DEVICES])


def _runtime() -> ctypes.CDLL:
    version = torch.version.cuda
    if version is None:
        raise AllocError("this torch is built without CUDA; install one with it")
    name = f"libcudart.so.{version.split('.')[0]}"
    # Whatever is in place of the runtime for the whole process comes first: a library that is
    # preloaded stands before the one that torch names.
    for library in (None, name):
        try:
            loaded = ctypes.CDLL(library)
            for needed in _NAMES:
                getattr(loaded, needed)
            return loaded
        except (AttributeError, OSError):
            continue
    raise AllocError(f"{name}, the CUDA runtime that torch is built for, cannot be loaded")


def _address(runtime: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value


def _drivers_function(runtime: ctypes.CDLL, name: str) -> int:
    found, status = ctypes.c_void_p(), ctypes.c_int()
    failed = runtime.cudaGetDriverEntryPointByVersion(
        name.encode(),
        ctypes.byref(found),
        _FIRST_WITH_THEM,
        ctypes.c_ulonglong(),
        ctypes.byref(status),
    )
    if failed or status.value or not found.value:
        raise AllocError(
            f"the CUDA driver has no {name} (error {failed}, {status.value}); set "
            "use_virtual_memory to False"
        )
    return found.value

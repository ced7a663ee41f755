"""Pages of a GPU's memory behind reserved addresses, by the functions of the CUDA driver.

Only the driver's own library is loaded, whatever runtime a program has. Importing this module loads
nothing. Invariant: a page has a handle here exactly while memory is mapped behind it.
"""

import ctypes
from functools import cache
from typing import final

from gpu_alloc.errors import AllocError
from gpu_alloc.sources.paged import PagedSource

_DRIVER = "libcuda.so.1"
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # of CUmemAllocationProp and CUmemAccessDesc
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NUMBER, _SIZE = ctypes.c_uint64, ctypes.c_size_t


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@final
class CudaPagedSource(PagedSource):
    """Pages of one device, as `cuMemMap` puts them behind addresses.

    Raises AllocError where there is no driver, or it cannot map pages on the device.
    """

    def __init__(self, device_id: int) -> None:
        self._device_id, self._context = device_id, ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), device_id)
        # The context that every runtime of the process uses; it ends with the process.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        location = _Location(_ON_DEVICE, device.value)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        self._handles: dict[int, int] = {}  # by page

    def acquire(self, size_bytes: int) -> int | None:
        """See `PagedSource`."""
        found = _NUMBER()
        zero = _NUMBER()
        self._call(
            "cuMemAddressReserve", ctypes.byref(found), _SIZE(size_bytes), _SIZE(), zero, zero
        )
        return found.value

    def release(self, ptr: int, size_bytes: int) -> None:
        """See `ChunkSource.release`."""
        self._call("cuMemAddressFree", _NUMBER(ptr), _SIZE(size_bytes))

    def map(self, ptr: int, size_bytes: int) -> bool:
        """See `PagedSource.map`. Raises AllocError for what is not a lack of room."""
        end = ptr + size_bytes
        try:
            for page in range(ptr, end, self.granularity_bytes):
                if not self._map_page(page):
                    self._unmap_pages(ptr, page)
                    return False
            access, one = ctypes.byref(self._access), _SIZE(1)
            self._call("cuMemSetAccess", _NUMBER(ptr), _SIZE(size_bytes), access, one)
        except AllocError:
            self._unmap_pages(ptr, end)
            raise
        return True

    def unmap(self, ptr: int, size_bytes: int) -> None:
        """See `PagedSource.unmap`."""
        previous = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuCtxSynchronize")  # cuMemUnmap does not wait
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(previous))
        self._unmap_pages(ptr, ptr + size_bytes)

    def _map_page(self, page: int) -> bool:
        handle, size = _NUMBER(), _SIZE(self.granularity_bytes)
        properties = ctypes.byref(self._properties)
        status = _driver().cuMemCreate(ctypes.byref(handle), size, properties, _NUMBER())
        if status == _OUT_OF_MEMORY:
            return False
        self._check("cuMemCreate", status)
        try:
            self._call("cuMemMap", _NUMBER(page), size, _SIZE(), handle, _NUMBER())
        except AllocError:
            self._call("cuMemRelease", handle)
            raise
        self._handles[page] = handle.value
        return True

    def _unmap_pages(self, start: int, end: int) -> None:
        for page in range(start, end, self.granularity_bytes):
            handle = self._handles.pop(page, None)
            if handle is not None:
                self._call("cuMemUnmap", _NUMBER(page), _SIZE(self.granularity_bytes))
                self._call("cuMemRelease", _NUMBER(handle))

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(_driver(), name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise AllocError(
                f"{name} on device {self._device_id} ended with CUDA's error {status}; where the "
                "device cannot map pages set use_virtual_memory to False"
            )


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise AllocError(
            f"the CUDA driver cannot be loaded ({error}), and use_virtual_memory asks it for pages"
        ) from None

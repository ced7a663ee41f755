"""The one arena of a process: cores, one for each device, that C symbols of the library serve from.

torch calls the symbols; Python looks at the same cores here. Nothing of it needs Python's lock.

Invariant: a process has one arena, with one set of settings; asking for another is an error.
"""

import ctypes
import threading
from collections.abc import Sequence

from gpu_alloc.core import AllocatorConfig
from gpu_alloc.errors import AllocError, check_kind
from gpu_alloc.native.allocator import NativeAllocator
from gpu_alloc.native.binding import Core, functions_of, native_library, settings_of

_PAGE_BYTES = 2 << 20
_IN_PAGES = ("reserve", "free", "map", "unmap")  # in place of cudaMalloc and cudaFree, and beside
_MOST_DEVICES = 64
# One allocator for each core, which knows the names of its marks.
_ALLOCATORS: dict[int, NativeAllocator] = {}
_LOCK = threading.Lock()


class Arena:
    """The cores that were set up with `config`, made on each device when it is first asked.

    pointers: the addresses of CUDA's functions in the order of core.cpp. driver: those of its
    struct `Driver`, needed with `use_virtual_memory`.
    """

    def __init__(
        self,
        config: AllocatorConfig,
        pointers: Sequence[int | None],
        driver: Sequence[int | None] = (),
    ) -> None:
        check_kind(config, AllocatorConfig, "config must be an AllocatorConfig")
        self.config = config
        self._library = native_library()
        settings = settings_of(config, granularity_bytes=_PAGE_BYTES)
        if config.use_virtual_memory:
            self._library.waiting.ga_driver((ctypes.c_void_p * len(driver))(*driver))
            reserve, free, *of_pages = (self.symbol(f"ga_driver_{name}") for name in _IN_PAGES)
            pointers = [reserve, free, *pointers[2:], *of_pages]
        if self._library.waiting.ga_serve(settings, functions_of(pointers)):
            raise AllocError(
                "torch is served by gpu_alloc with other settings already; a process has one "
                "arena, so give the same settings"
            )

    @property
    def path(self) -> str:
        """The library that has the symbols."""
        return str(self._library.path)

    def symbol(self, name: str) -> int:
        """The address of one of the library's functions."""
        return self._library.address_of(name)

    def devices(self) -> list[int]:
        """The devices that have been used."""
        held = self._library.fast.ga_core_if_any
        return [device for device in range(_MOST_DEVICES) if held(device)]

    def allocator(self, device: int) -> NativeAllocator:
        """The allocator of a device, which pre-allocates at its first use.

        Raises AllocError when the pre-allocation does not fit.
        """
        handle = self._library.waiting.ga_core_of(device)
        if not handle:
            raise AllocError(
                f"device {device} has no room for the pre-allocation of "
                f"{self.config.large_pool_pre_alloc_in_mb} MiB for large and "
                f"{self.config.small_pool_pre_alloc_in_mb} MiB for small requests"
            )
        with _LOCK:
            if device not in _ALLOCATORS:
                core = Core(self._library, handle)
                _ALLOCATORS[device] = NativeAllocator.of_core(self.config, core)
            return _ALLOCATORS[device]

"""A two-pool auto-growth best-fit GPU allocator with statistics and replay.

Importing this package imports neither cupy nor torch and touches no device.

>>> import gpu_alloc
>>> gpu_alloc.TwoPoolAllocator(gpu_alloc.AddressSource(1 << 30)).malloc(100).size
512
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "AddressSource": "sources",
    "AllocError": "errors",
    "Allocation": "allocator",
    "AllocatorConfig": "config",
    "ChunkSource": "sources",
    "ConfigError": "errors",
    "HostSource": "sources",
    "InvalidFreeError": "errors",
    "OutOfMemoryError": "errors",
    "PoolStats": "stats",
    "ReplayResult": "replaying",
    "Snapshot": "snapshot",
    "Stats": "stats",
    "TraceEvent": "trace",
    "TwoPoolAllocator": "allocator",
    "check_snapshot": "snapshot",
    "load_trace": "trace",
    "minimal_capacity": "replaying",
    "replay": "replaying",
    "save_trace": "trace",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

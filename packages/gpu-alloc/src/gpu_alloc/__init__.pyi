from gpu_alloc.allocator import Allocation as Allocation
from gpu_alloc.allocator import TwoPoolAllocator as TwoPoolAllocator
from gpu_alloc.config import AllocatorConfig as AllocatorConfig
from gpu_alloc.errors import AllocError as AllocError
from gpu_alloc.errors import ConfigError as ConfigError
from gpu_alloc.errors import InvalidFreeError as InvalidFreeError
from gpu_alloc.errors import OutOfMemoryError as OutOfMemoryError
from gpu_alloc.replaying import ReplayResult as ReplayResult
from gpu_alloc.replaying import minimal_capacity as minimal_capacity
from gpu_alloc.replaying import replay as replay
from gpu_alloc.snapshot import Snapshot as Snapshot
from gpu_alloc.snapshot import check_snapshot as check_snapshot
from gpu_alloc.sources import AddressSource as AddressSource
from gpu_alloc.sources import ChunkSource as ChunkSource
from gpu_alloc.sources import HostSource as HostSource
from gpu_alloc.stats import PoolStats as PoolStats
from gpu_alloc.stats import Stats as Stats
from gpu_alloc.trace import TraceEvent as TraceEvent
from gpu_alloc.trace import load_trace as load_trace
from gpu_alloc.trace import save_trace as save_trace

__all__ = [
    "AddressSource",
    "AllocError",
    "Allocation",
    "AllocatorConfig",
    "ChunkSource",
    "ConfigError",
    "HostSource",
    "InvalidFreeError",
    "OutOfMemoryError",
    "PoolStats",
    "ReplayResult",
    "Snapshot",
    "Stats",
    "TraceEvent",
    "TwoPoolAllocator",
    "check_snapshot",
    "load_trace",
    "minimal_capacity",
    "replay",
    "save_trace",
]

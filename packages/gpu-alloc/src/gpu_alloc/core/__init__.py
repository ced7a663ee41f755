"""Where a request is placed: two pools of best fit over one source, safe for threads.

May import: sources, plan.
"""

from gpu_alloc.core.allocator import Allocation as Allocation
from gpu_alloc.core.allocator import TwoPoolAllocator as TwoPoolAllocator
from gpu_alloc.core.config import ENV_VARIABLE as ENV_VARIABLE
from gpu_alloc.core.config import MIB as MIB
from gpu_alloc.core.config import AllocatorConfig as AllocatorConfig
from gpu_alloc.core.oom import OomReport as OomReport
from gpu_alloc.core.oom import OutOfMemoryError as OutOfMemoryError
from gpu_alloc.core.oom import format_bytes as format_bytes
from gpu_alloc.core.snapshot import Snapshot as Snapshot
from gpu_alloc.core.snapshot import check_snapshot as check_snapshot
from gpu_alloc.core.stats import PoolStats as PoolStats
from gpu_alloc.core.stats import Stats as Stats

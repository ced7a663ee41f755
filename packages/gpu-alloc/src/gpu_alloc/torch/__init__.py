"""What torch allocates, as traces; torch's memory from our arena. Importing this imports torch.

May import: core, sources, trace, native.
"""

from gpu_alloc.torch.cache import TorchCache as TorchCache
from gpu_alloc.torch.forecasting import Forecast as Forecast
from gpu_alloc.torch.forecasting import forecast as forecast
from gpu_alloc.torch.recorder import TraceRecorder as TraceRecorder
from gpu_alloc.torch.replacement import replace as replace
from gpu_alloc.torch.runtime import open_arena as open_arena
from gpu_alloc.torch.segments import segments as segments
from gpu_alloc.torch.shapes import ShapesOnly as ShapesOnly
from gpu_alloc.torch.statistics import memory_stats as memory_stats

"""What is done with a recorded trace, on any machine: files, replay, the smallest device.

May import: core, sources.
"""

from gpu_alloc.trace.files import load_trace as load_trace
from gpu_alloc.trace.files import save_trace as save_trace
from gpu_alloc.trace.replaying import ReplayResult as ReplayResult
from gpu_alloc.trace.replaying import minimal_capacity as minimal_capacity
from gpu_alloc.trace.replaying import replay as replay
from gpu_alloc.trace.torch_snapshot import read_torch_snapshot as read_torch_snapshot
from gpu_alloc.trace.torch_snapshot import save_torch_snapshot as save_torch_snapshot
from gpu_alloc.trace.torch_snapshot import torch_snapshot as torch_snapshot

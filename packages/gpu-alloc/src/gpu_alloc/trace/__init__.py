"""What is done with a recorded trace, on any machine: replay, explain, tune, compare, plot.

May import: core, native, sources, plan.
"""

from gpu_alloc.trace.comparing import compare as compare
from gpu_alloc.trace.explaining import explain as explain
from gpu_alloc.trace.files import load_trace as load_trace
from gpu_alloc.trace.files import save_trace as save_trace
from gpu_alloc.trace.plotting import save_plot as save_plot
from gpu_alloc.trace.replaying import ReplayResult as ReplayResult
from gpu_alloc.trace.replaying import minimal_capacity as minimal_capacity
from gpu_alloc.trace.replaying import replay as replay
from gpu_alloc.trace.summary import summarize as summarize
from gpu_alloc.trace.torch_snapshot import read_torch_snapshot as read_torch_snapshot
from gpu_alloc.trace.torch_snapshot import save_torch_snapshot as save_torch_snapshot
from gpu_alloc.trace.tuning import tune as tune

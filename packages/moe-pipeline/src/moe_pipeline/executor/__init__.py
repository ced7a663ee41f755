"""Runs a checked schedule: one rank's row over process groups, or all rows in one process.

May import: schedules, weight_grad, comm_collectives.
"""

from moe_pipeline.executor.execution_plan import stage_holders as stage_holders
from moe_pipeline.executor.groups import TiedParameters as TiedParameters
from moe_pipeline.executor.groups import token_scale as token_scale
from moe_pipeline.executor.measuring import measure_costs as measure_costs
from moe_pipeline.executor.memory_track import MemoryTrack as MemoryTrack
from moe_pipeline.executor.options import ExecutorOptions as ExecutorOptions
from moe_pipeline.executor.pipeline_executor import PipelineExecutor as PipelineExecutor
from moe_pipeline.executor.pytrees import map_tensors as map_tensors
from moe_pipeline.executor.shapes import infer_shapes as infer_shapes
from moe_pipeline.executor.stage_io import StageOutput as StageOutput
from moe_pipeline.executor.time_track import TimeTrack as TimeTrack

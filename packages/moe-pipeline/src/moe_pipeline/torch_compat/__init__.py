"""The room `torch_compat`."""

from moe_pipeline.torch_compat.schedules import PipelineScheduleMulti as PipelineScheduleMulti
from moe_pipeline.torch_compat.schedules import PipelineScheduleSingle as PipelineScheduleSingle
from moe_pipeline.torch_compat.schedules import get_schedule_class as get_schedule_class

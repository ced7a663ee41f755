"""The interface of `torch.distributed.pipelining` over this package's executor.

May import: executor, schedules, weight_grad.
"""

from moe_pipeline.torch_compat.schedules import PipelineScheduleMulti as PipelineScheduleMulti
from moe_pipeline.torch_compat.schedules import PipelineScheduleSingle as PipelineScheduleSingle
from moe_pipeline.torch_compat.schedules import get_schedule_class as get_schedule_class

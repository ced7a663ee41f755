from moe_pipeline.checker import Problem as Problem
from moe_pipeline.checker import check as check
from moe_pipeline.config import MoEConfig as MoEConfig
from moe_pipeline.errors import MoEPipelineError as MoEPipelineError
from moe_pipeline.errors import ScheduleError as ScheduleError
from moe_pipeline.errors import StageTransferError as StageTransferError
from moe_pipeline.executor import PipelineExecutor as PipelineExecutor
from moe_pipeline.experts import Experts as Experts
from moe_pipeline.generators import forward_only as forward_only
from moe_pipeline.generators import forward_then_backward as forward_then_backward
from moe_pipeline.generators import one_f_one_b as one_f_one_b
from moe_pipeline.layer import MoELayer as MoELayer
from moe_pipeline.layer import MoEOutput as MoEOutput
from moe_pipeline.picture import format_schedule as format_schedule
from moe_pipeline.router import RoutingPlan as RoutingPlan
from moe_pipeline.router import TopKRouter as TopKRouter
from moe_pipeline.schedule import Action as Action
from moe_pipeline.schedule import Kind as Kind
from moe_pipeline.schedule import Schedule as Schedule
from moe_pipeline.schedule import add_transfers as add_transfers
from moe_pipeline.schedule_csv import from_csv as from_csv
from moe_pipeline.schedule_csv import to_csv as to_csv
from moe_pipeline.stage_io import StageOutput as StageOutput

__all__ = [
    "Action",
    "Experts",
    "Kind",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "MoEPipelineError",
    "PipelineExecutor",
    "Problem",
    "RoutingPlan",
    "Schedule",
    "ScheduleError",
    "StageOutput",
    "StageTransferError",
    "TopKRouter",
    "add_transfers",
    "check",
    "format_schedule",
    "forward_only",
    "forward_then_backward",
    "from_csv",
    "one_f_one_b",
    "to_csv",
]

from moe_pipeline.config import ExpertsOptions as ExpertsOptions
from moe_pipeline.config import MoEConfig as MoEConfig
from moe_pipeline.config import RouterLosses as RouterLosses
from moe_pipeline.config import RouterOptions as RouterOptions
from moe_pipeline.config import SharedExpertOptions as SharedExpertOptions
from moe_pipeline.errors import MoEPipelineError as MoEPipelineError
from moe_pipeline.errors import ScheduleError as ScheduleError
from moe_pipeline.errors import StageTransferError as StageTransferError
from moe_pipeline.executor.measuring import measure_costs as measure_costs
from moe_pipeline.executor.memory_track import MemoryTrack as MemoryTrack
from moe_pipeline.executor.pipeline_executor import PipelineExecutor as PipelineExecutor
from moe_pipeline.executor.pipeline_groups import PipelineGroups as PipelineGroups
from moe_pipeline.executor.pipeline_groups import connect_pairs as connect_pairs
from moe_pipeline.executor.pipeline_groups import make_pipeline_groups as make_pipeline_groups
from moe_pipeline.executor.shapes import TensorShape as TensorShape
from moe_pipeline.executor.shapes import infer_shapes as infer_shapes
from moe_pipeline.executor.stage_io import StageOutput as StageOutput
from moe_pipeline.executor.table import stage_holders as stage_holders
from moe_pipeline.executor.tied import TiedParameters as TiedParameters
from moe_pipeline.executor.token_loss import token_scale as token_scale
from moe_pipeline.families.catalog import Family as Family
from moe_pipeline.families.catalog import family_of as family_of
from moe_pipeline.families.upcycling import upcycled_state as upcycled_state
from moe_pipeline.groups import MoEGroups as MoEGroups
from moe_pipeline.layer.folding import ExpertAxes as ExpertAxes
from moe_pipeline.layer.folding import fold_experts as fold_experts
from moe_pipeline.layer.local_experts import Experts as Experts
from moe_pipeline.layer.moe_layer import MoELayer as MoELayer
from moe_pipeline.layer.moe_layer import MoEOutput as MoEOutput
from moe_pipeline.layer.router_replay import record_routing as record_routing
from moe_pipeline.layer.router_replay import replay_routing as replay_routing
from moe_pipeline.ops.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from moe_pipeline.ops.dropout import dropout_add as dropout_add
from moe_pipeline.ops.rng import counter_key as counter_key
from moe_pipeline.ops.rng import counter_normal as counter_normal
from moe_pipeline.ops.rng import counter_uniform as counter_uniform
from moe_pipeline.recomputation.offload import ActivationOffload as ActivationOffload
from moe_pipeline.recomputation.output_discarding import discard_outputs as discard_outputs
from moe_pipeline.recomputation.output_discarding import discarded as discarded
from moe_pipeline.recomputation.recomputing import is_replaying as is_replaying
from moe_pipeline.recomputation.recomputing import recompute as recompute
from moe_pipeline.recomputation.recomputing import recompute_contexts as recompute_contexts
from moe_pipeline.recomputation.recomputing import recorded as recorded
from moe_pipeline.recomputation.selective import MATRIX_PRODUCTS as MATRIX_PRODUCTS
from moe_pipeline.recomputation.selective import recompute_modules as recompute_modules
from moe_pipeline.recomputation.selective import selective_recompute as selective_recompute
from moe_pipeline.router.aux_loss import BalanceTerms as BalanceTerms
from moe_pipeline.router.aux_loss import global_batch_loss as global_batch_loss
from moe_pipeline.router.aux_loss import global_batch_shares as global_batch_shares
from moe_pipeline.router.expert_bias import update_expert_bias as update_expert_bias
from moe_pipeline.router.scope_check import check_aux_scope as check_aux_scope
from moe_pipeline.router.top_k import TopKRouter as TopKRouter
from moe_pipeline.routing_plan import Routed as Routed
from moe_pipeline.routing_plan import RoutingPlan as RoutingPlan
from moe_pipeline.schedules.generators.basic import forward_only as forward_only
from moe_pipeline.schedules.generators.basic import forward_then_backward as forward_then_backward
from moe_pipeline.schedules.generators.basic import one_f_one_b as one_f_one_b
from moe_pipeline.schedules.generators.catalog import SCHEDULES as SCHEDULES
from moe_pipeline.schedules.generators.dual_pipe import dualpipe as dualpipe
from moe_pipeline.schedules.generators.dual_pipe import dualpipe_v as dualpipe_v
from moe_pipeline.schedules.generators.interleaved import interleaved_1f1b as interleaved_1f1b
from moe_pipeline.schedules.generators.interleaved import looped_bfs as looped_bfs
from moe_pipeline.schedules.generators.interleaved_zb import (
    interleaved_zero_bubble as interleaved_zero_bubble,
)
from moe_pipeline.schedules.generators.v_shaped import v_half as v_half
from moe_pipeline.schedules.generators.v_shaped import v_min as v_min
from moe_pipeline.schedules.generators.v_shaped import zbv as zbv
from moe_pipeline.schedules.generators.zero_bubble import zb_1p as zb_1p
from moe_pipeline.schedules.generators.zero_bubble import zb_2p as zb_2p
from moe_pipeline.schedules.planner import plan as plan
from moe_pipeline.schedules.table.checker import Problem as Problem
from moe_pipeline.schedules.table.checker import check as check
from moe_pipeline.schedules.table.costs import StageCosts as StageCosts
from moe_pipeline.schedules.table.schedule import Action as Action
from moe_pipeline.schedules.table.schedule import Kind as Kind
from moe_pipeline.schedules.table.schedule import Schedule as Schedule
from moe_pipeline.schedules.table.schedule import add_transfers as add_transfers
from moe_pipeline.schedules.table.simulator import Simulation as Simulation
from moe_pipeline.schedules.table.simulator import simulate as simulate
from moe_pipeline.schedules.views.csv_file import from_csv as from_csv
from moe_pipeline.schedules.views.csv_file import to_csv as to_csv
from moe_pipeline.schedules.views.picture import format_schedule as format_schedule
from moe_pipeline.schedules.views.svg import to_svg as to_svg
from moe_pipeline.torch_compat.schedules import PipelineScheduleMulti as PipelineScheduleMulti
from moe_pipeline.torch_compat.schedules import PipelineScheduleSingle as PipelineScheduleSingle
from moe_pipeline.torch_compat.schedules import get_schedule_class as get_schedule_class
from moe_pipeline.weight_grad.queue import WeightQueue as WeightQueue
from moe_pipeline.weight_grad.queue import split_backward as split_backward
from moe_pipeline.weight_grad.token import put_off as put_off
from moe_pipeline.weight_grad.token import splittable as splittable

__all__ = [
    "MATRIX_PRODUCTS",
    "SCHEDULES",
    "Action",
    "ActivationOffload",
    "BalanceTerms",
    "ExpertAxes",
    "Experts",
    "ExpertsOptions",
    "Family",
    "Kind",
    "MemoryTrack",
    "MoEConfig",
    "MoEGroups",
    "MoELayer",
    "MoEOutput",
    "MoEPipelineError",
    "PipelineExecutor",
    "PipelineGroups",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Problem",
    "Routed",
    "RouterLosses",
    "RouterOptions",
    "RoutingPlan",
    "Schedule",
    "ScheduleError",
    "SharedExpertOptions",
    "Simulation",
    "StageCosts",
    "StageOutput",
    "StageTransferError",
    "TensorShape",
    "TiedParameters",
    "TopKRouter",
    "WeightQueue",
    "add_transfers",
    "check",
    "check_aux_scope",
    "chunked_cross_entropy",
    "connect_pairs",
    "counter_key",
    "counter_normal",
    "counter_uniform",
    "discard_outputs",
    "discarded",
    "dropout_add",
    "dualpipe",
    "dualpipe_v",
    "family_of",
    "fold_experts",
    "format_schedule",
    "forward_only",
    "forward_then_backward",
    "from_csv",
    "get_schedule_class",
    "global_batch_loss",
    "global_batch_shares",
    "infer_shapes",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "is_replaying",
    "looped_bfs",
    "make_pipeline_groups",
    "measure_costs",
    "one_f_one_b",
    "plan",
    "put_off",
    "recompute",
    "recompute_contexts",
    "recompute_modules",
    "record_routing",
    "recorded",
    "replay_routing",
    "selective_recompute",
    "simulate",
    "split_backward",
    "splittable",
    "stage_holders",
    "to_csv",
    "to_svg",
    "token_scale",
    "upcycled_state",
    "update_expert_bias",
    "v_half",
    "v_min",
    "zb_1p",
    "zb_2p",
    "zbv",
]

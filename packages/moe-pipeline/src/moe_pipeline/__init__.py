"""Mixture-of-Experts layers, and pipeline schedules as data with an executor.

Two halves that do not know each other: `MoELayer` (router, experts, exact auxiliary loss, expert
parallelism) and `Schedule`/`check`/`PipelineExecutor`. Importing this package imports neither; each
name is loaded when it is first used.

    from moe_pipeline import MoEConfig, MoELayer, one_f_one_b
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "MATRIX_PRODUCTS": "recomputation.selective",
    "SCHEDULES": "schedules.generators.catalog",
    "Action": "schedules.table.schedule",
    "ActivationOffload": "recomputation.offload",
    "BalanceTerms": "router.aux_loss",
    "ExpertAxes": "layer.folding",
    "Experts": "layer.local_experts",
    "ExpertsOptions": "config",
    "Family": "families.catalog",
    "Kind": "schedules.table.schedule",
    "MemoryTrack": "executor.memory_track",
    "MoEConfig": "config",
    "MoEGroups": "groups",
    "MoELayer": "layer.moe_layer",
    "MoEOutput": "layer.moe_layer",
    "MoEPipelineError": "errors",
    "PipelineExecutor": "executor.pipeline_executor",
    "PipelineGroups": "executor.pipeline_groups",
    "PipelineScheduleMulti": "torch_compat.schedules",
    "PipelineScheduleSingle": "torch_compat.schedules",
    "Problem": "schedules.table.checker",
    "Routed": "routing_plan",
    "RouterLosses": "config",
    "RouterOptions": "config",
    "RoutingPlan": "routing_plan",
    "Schedule": "schedules.table.schedule",
    "ScheduleError": "errors",
    "SharedExpertOptions": "config",
    "Simulation": "schedules.table.simulator",
    "StageCosts": "schedules.table.costs",
    "StageOutput": "executor.stage_io",
    "StageTransferError": "errors",
    "TensorShape": "executor.shapes",
    "TiedParameters": "executor.tied",
    "TopKRouter": "router.top_k",
    "WeightQueue": "weight_grad.queue",
    "add_transfers": "schedules.table.schedule",
    "check": "schedules.table.checker",
    "check_aux_scope": "router.scope_check",
    "chunked_cross_entropy": "ops.cross_entropy",
    "connect_pairs": "executor.pipeline_groups",
    "counter_key": "ops.rng",
    "counter_normal": "ops.rng",
    "counter_uniform": "ops.rng",
    "discard_outputs": "recomputation.output_discarding",
    "discarded": "recomputation.output_discarding",
    "dropout_add": "ops.dropout",
    "dualpipe": "schedules.generators.dual_pipe",
    "dualpipe_v": "schedules.generators.dual_pipe",
    "family_of": "families.catalog",
    "fold_experts": "layer.folding",
    "format_schedule": "schedules.views.picture",
    "forward_only": "schedules.generators.basic",
    "forward_then_backward": "schedules.generators.basic",
    "from_csv": "schedules.views.csv_file",
    "get_schedule_class": "torch_compat.schedules",
    "global_batch_loss": "router.aux_loss",
    "global_batch_shares": "router.aux_loss",
    "infer_shapes": "executor.shapes",
    "interleaved_1f1b": "schedules.generators.interleaved",
    "interleaved_zero_bubble": "schedules.generators.interleaved_zb",
    "is_replaying": "recomputation.recomputing",
    "looped_bfs": "schedules.generators.interleaved",
    "make_pipeline_groups": "executor.pipeline_groups",
    "measure_costs": "executor.measuring",
    "one_f_one_b": "schedules.generators.basic",
    "plan": "schedules.planner",
    "put_off": "weight_grad.token",
    "recompute": "recomputation.recomputing",
    "recompute_contexts": "recomputation.recomputing",
    "recompute_modules": "recomputation.selective",
    "record_routing": "layer.router_replay",
    "recorded": "recomputation.recomputing",
    "replay_routing": "layer.router_replay",
    "selective_recompute": "recomputation.selective",
    "simulate": "schedules.table.simulator",
    "split_backward": "weight_grad.queue",
    "splittable": "weight_grad.token",
    "stage_holders": "executor.table",
    "to_csv": "schedules.views.csv_file",
    "to_svg": "schedules.views.svg",
    "token_scale": "executor.token_loss",
    "upcycled_state": "families.upcycling",
    "update_expert_bias": "router.expert_bias",
    "v_half": "schedules.generators.v_shaped",
    "v_min": "schedules.generators.v_shaped",
    "zb_1p": "schedules.generators.zero_bubble",
    "zb_2p": "schedules.generators.zero_bubble",
    "zbv": "schedules.generators.v_shaped",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Mixture-of-Experts layers, and pipeline schedules as data with an executor.

Two halves that do not know each other: `MoELayer` (router, experts, exact auxiliary loss, expert
parallelism) and `Schedule`/`check`/`PipelineExecutor`. Importing this package imports neither; each
name is loaded when it is first used.

    from moe_pipeline import MoEConfig, MoELayer, one_f_one_b
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "MATRIX_PRODUCTS": "selective",
    "SCHEDULES": "catalog",
    "Action": "schedule",
    "ActivationOffload": "offload",
    "BalanceTerms": "aux_loss",
    "ExpertAxes": "folding",
    "Experts": "local_experts",
    "ExpertsOptions": "config",
    "Family": "families",
    "Kind": "schedule",
    "MemoryTrack": "memory_track",
    "MoEConfig": "config",
    "MoEGroups": "groups",
    "MoELayer": "layer",
    "MoEOutput": "layer",
    "MoEPipelineError": "errors",
    "PipelineExecutor": "executor",
    "PipelineGroups": "pipeline_groups",
    "PipelineScheduleMulti": "torch_schedules",
    "PipelineScheduleSingle": "torch_schedules",
    "Problem": "checker",
    "Routed": "routing_plan",
    "RouterLosses": "config",
    "RouterOptions": "config",
    "RoutingPlan": "routing_plan",
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "SharedExpertOptions": "config",
    "Simulation": "simulator",
    "StageCosts": "costs",
    "StageOutput": "stage_io",
    "StageTransferError": "errors",
    "TensorShape": "shapes",
    "TiedParameters": "tied",
    "TopKRouter": "router",
    "WeightQueue": "weight_queue",
    "add_transfers": "schedule",
    "check": "checker",
    "check_aux_scope": "scope_check",
    "chunked_cross_entropy": "cross_entropy",
    "connect_pairs": "pipeline_groups",
    "counter_key": "rng",
    "counter_normal": "rng",
    "counter_uniform": "rng",
    "discard_outputs": "output_discarding",
    "discarded": "output_discarding",
    "dropout_add": "dropout",
    "dualpipe": "generators_dualpipe",
    "dualpipe_v": "generators_dualpipe",
    "family_of": "families",
    "fold_experts": "folding",
    "format_schedule": "picture",
    "forward_only": "generators",
    "forward_then_backward": "generators",
    "from_csv": "schedule_csv",
    "get_schedule_class": "torch_schedules",
    "global_batch_loss": "aux_loss",
    "global_batch_shares": "aux_loss",
    "infer_shapes": "shapes",
    "interleaved_1f1b": "generators_interleaved",
    "interleaved_zero_bubble": "generators_interleaved_zb",
    "is_replaying": "recomputing",
    "looped_bfs": "generators_interleaved",
    "make_pipeline_groups": "pipeline_groups",
    "measure_costs": "measuring",
    "one_f_one_b": "generators",
    "plan": "planner",
    "put_off": "weight_token",
    "recompute": "recomputing",
    "recompute_contexts": "recomputing",
    "recompute_modules": "selective",
    "record_routing": "router_replay",
    "recorded": "recomputing",
    "replay_routing": "router_replay",
    "selective_recompute": "selective",
    "simulate": "simulator",
    "split_backward": "weight_queue",
    "splittable": "weight_token",
    "stage_holders": "executor_table",
    "to_csv": "schedule_csv",
    "to_svg": "svg",
    "token_scale": "token_loss",
    "upcycled_state": "upcycling",
    "update_expert_bias": "expert_bias",
    "v_half": "generators_v",
    "v_min": "generators_v",
    "zb_1p": "generators_zero_bubble",
    "zb_2p": "generators_zero_bubble",
    "zbv": "generators_v",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

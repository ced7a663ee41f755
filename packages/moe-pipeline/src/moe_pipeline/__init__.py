"""Mixture-of-Experts layers, and pipeline schedules as data with an executor.

Two halves that do not know each other: `MoELayer` (router, experts, exact auxiliary loss, expert
parallelism) and `Schedule`/`check`/`PipelineExecutor`. Importing this package imports neither; each
name is loaded when it is first used.

    from moe_pipeline import MoEConfig, MoELayer, one_f_one_b
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "SCHEDULES": "catalog",
    "Action": "schedule",
    "BalanceTerms": "aux_loss",
    "ExpertAxes": "folding",
    "Experts": "local_experts",
    "ExpertsOptions": "config",
    "Family": "families",
    "Kind": "schedule",
    "MoEConfig": "config",
    "MoEGroups": "groups",
    "MoELayer": "layer",
    "MoEOutput": "layer",
    "MoEPipelineError": "errors",
    "PipelineExecutor": "executor",
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
    "TopKRouter": "router",
    "add_transfers": "schedule",
    "check": "checker",
    "check_aux_scope": "scope_check",
    "chunked_cross_entropy": "cross_entropy",
    "counter_key": "rng",
    "counter_normal": "rng",
    "counter_uniform": "rng",
    "dropout_add": "dropout",
    "dualpipe": "generators_dualpipe",
    "dualpipe_v": "generators_dualpipe",
    "family_of": "families",
    "fold_experts": "folding",
    "format_schedule": "picture",
    "forward_only": "generators",
    "forward_then_backward": "generators",
    "from_csv": "schedule_csv",
    "global_batch_loss": "aux_loss",
    "global_batch_shares": "aux_loss",
    "interleaved_1f1b": "generators_interleaved",
    "is_replaying": "recomputing",
    "looped_bfs": "generators_interleaved",
    "one_f_one_b": "generators",
    "plan": "planner",
    "recompute": "recomputing",
    "recompute_contexts": "recomputing",
    "record_routing": "router_replay",
    "recorded": "recomputing",
    "replay_routing": "router_replay",
    "simulate": "simulator",
    "to_csv": "schedule_csv",
    "to_svg": "svg",
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

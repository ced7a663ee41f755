"""Mixture-of-Experts layers, and pipeline schedules as data with an executor.

Two halves that do not know each other: `MoELayer` (router, experts, exact auxiliary loss, expert
parallelism) and `Schedule`/`check`/`PipelineExecutor`. Importing this package imports neither; each
name is loaded when it is first used.

    from moe_pipeline import MoEConfig, MoELayer, one_f_one_b
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "Action": "schedule",
    "Experts": "experts",
    "Kind": "schedule",
    "MoEConfig": "config",
    "MoELayer": "layer",
    "MoEOutput": "layer",
    "MoEPipelineError": "errors",
    "PipelineExecutor": "executor",
    "Problem": "checker",
    "RoutingPlan": "router",
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "StageOutput": "stage_io",
    "StageTransferError": "errors",
    "TopKRouter": "router",
    "add_transfers": "schedule",
    "check": "checker",
    "format_schedule": "picture",
    "forward_only": "generators",
    "forward_then_backward": "generators",
    "from_csv": "schedule_csv",
    "one_f_one_b": "generators",
    "to_csv": "schedule_csv",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

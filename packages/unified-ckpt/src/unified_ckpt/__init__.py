"""Crash-safe safetensors checkpoints that load under any parallel layout."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "AsyncSaveResponse": "background.async_saving",
    "AsyncSaver": "background.saver",
    "AsyncSaverConfig": "background.config",
    "BoxMeta": "geometry.shard",
    "CheckpointError": "errors",
    "CheckpointManager": "run.manager",
    "CorruptCheckpointError": "errors",
    "DamagedCheckpointWarning": "errors",
    "Decision": "run.manager",
    "Difference": "tools.diff",
    "EmaConfig": "background.ema",
    "LoadError": "errors",
    "LoadOptions": "options",
    "LoadReport": "loading.collective_load",
    "LocalBox": "geometry.layouts.layouts",
    "ManagerOptions": "run.manager",
    "OffloadPlan": "background.offload_plan",
    "ParallelDegrees": "geometry.layouts.layouts",
    "ParameterRule": "geometry.layouts.layouts",
    "Problem": "run.verify",
    "SaveArgumentError": "errors",
    "SaveError": "errors",
    "SaveOptions": "options",
    "SavePeerError": "errors",
    "SavePlan": "plans.save_plan",
    "SaveReport": "saving.collective_save",
    "Shard": "geometry.shard",
    "SplitTensor": "plans.load_plan",
    "Stateful": "state.nested",
    "StoredTensor": "plans.load_plan",
    "UnifiedStorageReader": "dcp.reader",
    "UnifiedStorageWriter": "dcp.writer",
    "VerifyReport": "run.verify",
    "ZeroCostSaver": "background.zero_cost",
    "async_save": "background.async_saving",
    "copy_checkpoint": "run.tiers",
    "diff_checkpoints": "tools.diff",
    "expert_shards": "geometry.layouts.layouts",
    "export_model": "tools.rewrite",
    "find_fault": "run.folder",
    "find_tied_keys": "state.nested",
    "flat_buffer_ranges": "geometry.flat",
    "flush_tier": "run.tiers",
    "get_last_checkpoint": "run.folder",
    "global_expert_keys": "geometry.layouts.layouts",
    "last_checkpoint_of_tiers": "run.tiers",
    "load": "loading.collective_load",
    "load_files": "plans.checkpoint.directory",
    "plan_load": "plans.load_plan",
    "plan_offload": "background.offload_plan",
    "plan_save": "plans.save_plan",
    "random_state_files": "state.random_state",
    "rank_box": "geometry.layouts.layouts",
    "read_index": "plans.checkpoint.directory",
    "reshard": "tools.rewrite",
    "restore_random_state": "state.random_state",
    "rotate": "run.folder",
    "save": "saving.collective_save",
    "valid_checkpoints": "run.folder",
    "verify_checkpoint": "run.verify",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Crash-safe safetensors checkpoints that load under any parallel layout."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "AsyncSaveResponse": "async_saving",
    "AsyncSaver": "saver",
    "AsyncSaverConfig": "saver_config",
    "BoxMeta": "shard",
    "CheckpointError": "errors",
    "CheckpointManager": "manager",
    "CorruptCheckpointError": "errors",
    "DamagedCheckpointWarning": "errors",
    "Decision": "manager",
    "Difference": "diff",
    "EmaConfig": "ema",
    "LoadError": "errors",
    "LoadOptions": "options",
    "LoadReport": "loading",
    "LocalBox": "layouts",
    "ManagerOptions": "manager",
    "OffloadPlan": "offload_plan",
    "ParallelDegrees": "layouts",
    "ParameterRule": "layouts",
    "Problem": "verify",
    "SaveArgumentError": "errors",
    "SaveError": "errors",
    "SaveOptions": "options",
    "SavePeerError": "errors",
    "SavePlan": "save_plan",
    "SaveReport": "saving",
    "Shard": "shard",
    "SplitTensor": "load_plan",
    "Stateful": "state",
    "StoredTensor": "load_plan",
    "UnifiedStorageReader": "dcp_reader",
    "UnifiedStorageWriter": "dcp_writer",
    "VerifyReport": "verify",
    "ZeroCostSaver": "zero_cost",
    "async_save": "async_saving",
    "copy_checkpoint": "tiers",
    "diff_checkpoints": "diff",
    "expert_shards": "layouts",
    "export_model": "rewrite",
    "find_fault": "folder",
    "find_tied_keys": "state",
    "flat_buffer_ranges": "flat",
    "flush_tier": "tiers",
    "get_last_checkpoint": "folder",
    "global_expert_keys": "layouts",
    "last_checkpoint_of_tiers": "tiers",
    "load": "loading",
    "load_files": "checkpoint",
    "plan_load": "load_plan",
    "plan_offload": "offload_plan",
    "plan_save": "save_plan",
    "random_state_files": "random_state",
    "rank_box": "layouts",
    "read_index": "checkpoint",
    "reshard": "rewrite",
    "restore_random_state": "random_state",
    "rotate": "folder",
    "save": "saving",
    "valid_checkpoints": "folder",
    "verify_checkpoint": "verify",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

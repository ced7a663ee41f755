"""Crash-safe safetensors checkpoints that load under any parallel layout."""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "BoxMeta": "shard",
    "CheckpointError": "errors",
    "CorruptCheckpointError": "errors",
    "LoadError": "errors",
    "LoadReport": "loading",
    "SaveArgumentError": "errors",
    "SaveError": "errors",
    "SavePeerError": "errors",
    "SavePlan": "save_plan",
    "SaveReport": "saving",
    "Shard": "shard",
    "StoredTensor": "load_plan",
    "get_last_checkpoint": "folder",
    "load": "loading",
    "load_files": "checkpoint",
    "plan_load": "load_plan",
    "plan_save": "save_plan",
    "read_index": "checkpoint",
    "rotate": "folder",
    "save": "saving",
    "verify_checkpoint": "verify",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

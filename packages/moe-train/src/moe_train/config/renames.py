"""Keys and values that had another spelling before: the one table of them.

A checkpoint's own `moe_train.toml` is read with its former keys and values, so that checkpoints
saved before can still be used as a job. In a file that a person writes they are an error that names
the new spelling.

    tables = renewed(tables)                       # of a checkpoint
    refuse_former_values("data", {"max_bytes": 0})  # ValueError: ... leave it out
"""

import math
from collections.abc import Mapping
from typing import Any

from moe_train.errors import TrainValueError

RENAMED_KEYS: Mapping[str, str] = {
    "model.router_aux_loss_scope": "moe.aux_loss_scope",
    "moe.moe_router_load_balancing_scope": "moe.aux_loss_scope",
    "moe.moe_aux_loss_coeff": "moe.aux_loss_coef",
    "moe.moe_z_loss_coeff": "moe.z_loss_coef",
    "moe.moe_expert_capacity_factor": "moe.capacity_factor",
    "moe.moe_token_drop_policy": "moe.token_drop_policy",
    "moe.moe_router_enable_expert_bias": "moe.update_expert_bias",
    "moe.moe_router_bias_update_rate": "moe.expert_bias_update_rate",
}
"""Former key -> key."""

_NO_INTERVAL = 1_000_000_000  # steps; longer than any run, so only its end is validated

FORMER_VALUES: Mapping[str, tuple[Any, Any]] = {
    "model.config_file": ("", None),
    "model.init_from": ("", None),
    "moe.aux_loss_scope": ("micro_batch", "microbatch"),
    "moe.aux_loss_coef": (-1, None),
    "moe.capacity_factor": (0, None),
    "data.extensions": ([], ["*"]),
    "data.max_bytes": (0, None),
    "data.cache_dir": ("", None),
    "tokenizer.file": ("", None),
    "train.recompute": ("none", None),
    "train.loss_chunk_tokens": (0, None),
    "train.validation_interval_steps": (0, _NO_INTERVAL),
    "train.threads_per_rank": (0, None),
    "optimizer.max_grad_norm": (0, math.inf),
    "checkpoint.interval_steps": (0, None),
}
"""Key -> its former value, and what takes its place; None: leave the key out."""


def renewed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with former keys and values in their present spelling; all else stays."""
    found: dict[str, Any] = {}
    for table, values in tables.items():
        if not isinstance(values, dict):
            found[table] = values
            continue
        for name, given in values.items():
            full_name = RENAMED_KEYS.get(f"{table}.{name}", f"{table}.{name}")
            value = _present_value(full_name, given)
            if value is not None:
                new_table, _, new_name = full_name.partition(".")
                found.setdefault(new_table, {})[new_name] = value
    return found


def refuse_former_values(table: str, values: Mapping[str, Any]) -> None:
    """Refuse values of one table that meant something else before.

    Raises:
        ValueError: names the value and what takes its place.
    """
    for name, given in values.items():
        value = _present_value(f"{table}.{name}", given)
        if value is None:
            raise TrainValueError(
                f"{table}.{name}={given!r} no longer stands for a key that is not set; leave it out"
            )
        if value is not given:
            raise TrainValueError(f"{table}.{name}={given!r} is now written {value!r}")


def _present_value(full_name: str, given: Any) -> Any:
    if full_name not in FORMER_VALUES or isinstance(given, bool):
        return given
    former, value = FORMER_VALUES[full_name]
    return value if given == former else given

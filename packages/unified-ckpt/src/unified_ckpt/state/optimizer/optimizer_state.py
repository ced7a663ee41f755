"""Optimizer states under their parameters' names: `w/moment1`, `w/moment2`, `w/step`.

torch numbers parameters, which means nothing under another layout, so names are asked for: those of
an optimizer made from `model.named_parameters()`, or of `get_optimizer_state_dict`. Adam's
`exp_avg` and `exp_avg_sq` are stored as `moment1` and `moment2`, other states under torch's names,
and fp32 copies of parameters in the part `master_weights`.

    entries, groups = optimizer_entries(torch.optim.AdamW(model.named_parameters()), "optimizer")
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from unified_ckpt.errors import CheckpointValueError

MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
MASTER_NAMES = frozenset({"master_weight", "master_weights", "master_param"})
MASTER_FIELD = "master_weight_state"  # a value: under which name states held master weights
_ID_FIELDS = frozenset({"params", "param_names"})

Entries = list[tuple[str, MutableMapping[str, Any]]]
Groups = list[MutableMapping[str, Any]]


def is_optimizer_state(value: object) -> bool:
    """Whether a value is an optimizer, or a state dict of one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return isinstance(value, Mapping) and set(value) == {"state", "param_groups"}


def optimizer_entries(
    optimizer: torch.optim.Optimizer | Mapping[str, Any], path: str
) -> tuple[Entries, Groups]:
    """Return (parameter name, its live state) pairs, empty states included, and the groups."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = list(optimizer.param_groups)
        state: Mapping[Any, MutableMapping[str, Any]] = optimizer.state
    else:
        groups, state = list(optimizer["param_groups"]), optimizer["state"]
    entries: Entries = []
    for group in groups:
        for name, identity in zip(parameter_names(group, path), group["params"], strict=True):
            entries.append((name, state.get(identity, {})))
    return entries, groups


def hyperparameters(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's fields that are not about which parameters it has."""
    return [name for name in group if name not in _ID_FIELDS]


def parameter_names(group: Mapping[str, Any], path: str) -> list[str]:
    """Return the names of a group's parameters, in its order."""
    names = group.get("param_names", group["params"])
    if not all(isinstance(name, str) for name in names):
        raise CheckpointValueError(
            f"{path}: the optimizer numbers its parameters, which means nothing under another "
            "layout; make it from model.named_parameters(), or pass get_optimizer_state_dict(...) "
            "of torch.distributed.checkpoint.state_dict"
        )
    return list(names)

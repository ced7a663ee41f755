"""Optimizer states under their parameters' names: `w/moment1`, `w/moment2`, `w/step`.

torch numbers parameters, which means nothing under another layout, so names are asked for: those of
an optimizer made from `model.named_parameters()`, or of `get_optimizer_state_dict`. Adam's
`exp_avg` and `exp_avg_sq` are stored as `moment1` and `moment2`, other states under torch's names,
and fp32 copies of parameters in the part `master_weights`.

    entries, groups = optimizer_entries(torch.optim.AdamW(model.named_parameters()), "optimizer")
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from unified_ckpt.dtypes import dtype_of
from unified_ckpt.load_plan import SplitTensor, StoredTensor
from unified_ckpt.shard import Shard

MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
MASTER_NAMES = frozenset({"master_weight", "master_weights", "master_param"})
_TORCH_NAMES = {stored: name for name, stored in MOMENTS.items()}
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
    """Return (parameter name, its live state) pairs, empty states included, and the groups.

    Raises:
        ValueError: the parameters have numbers only.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = list(optimizer.param_groups)
        state: Mapping[Any, MutableMapping[str, Any]] = optimizer.state
    else:
        groups, state = list(optimizer["param_groups"]), optimizer["state"]
    entries: Entries = []
    for group in groups:
        for name, identity in zip(_names(group, path), group["params"], strict=True):
            entries.append((name, state.get(identity, {})))
    return entries, groups


def hyperparameters(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's fields that are not about which parameters it has."""
    return [name for name in group if name not in _ID_FIELDS]


def _names(group: Mapping[str, Any], path: str) -> Sequence[str]:
    names = group.get("param_names", group["params"])
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{path}: the optimizer numbers its parameters, which means nothing under another "
            "layout; make it from model.named_parameters(), or pass get_optimizer_state_dict(...) "
            "of torch.distributed.checkpoint.state_dict"
        )
    return list(names)


def allocate_states(
    optimizer: torch.optim.Optimizer,
    index: Mapping[str, StoredTensor | SplitTensor],
    path: str,
    place: Callable[[str, torch.Tensor], Sequence[Shard]],
) -> None:
    """Give a fresh optimizer zeros for every state that a checkpoint holds of its parameters.

    A state that is shaped like its parameter becomes like it (a DTensor too), but of the stored
    dtype; any other state is whole, of the stored shape. Compressed moments become fp32.

    Args:
        place: returns the stored boxes of a parameter; their keys are looked up.
    """
    stored_of: dict[str, list[tuple[str, StoredTensor | SplitTensor]]] = {}
    for key, stored in index.items():
        name, slash, state = key.partition("/")
        if slash and "/" not in state:
            stored_of.setdefault(name, []).append((state, stored))
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in zip(_names(group, path), group["params"], strict=True):
            box = next((b for b in place(name, parameter) if b.key in stored_of), None)
            for stored_name, stored in stored_of[box.key] if box is not None else ():
                torch_name = _TORCH_NAMES.get(stored_name, stored_name)
                state = optimizer.state[parameter]
                if torch_name not in state:
                    like = box is not None and stored.shape == box.global_shape
                    device = parameter.device if stored.shape or on_device else "cpu"
                    state[torch_name] = _zeros(parameter if like else None, stored, device)


def _zeros(
    like: torch.Tensor | None, stored: StoredTensor | SplitTensor, device: torch.device | str
) -> torch.Tensor:
    dtype = dtype_of("F32" if stored.dtype in ("I8", "U8") else stored.dtype).torch_dtype
    if like is None:
        return torch.zeros(stored.shape or (), dtype=dtype, device=device)
    return torch.zeros_like(like.detach(), dtype=dtype, memory_format=torch.preserve_format)

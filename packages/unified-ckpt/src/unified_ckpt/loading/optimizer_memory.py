"""Memory for the stored states of a fresh optimizer, which has none before its first step.

added = allocate_states(optimizer, stored, "optimizer", place)
remove_states(optimizer, added.states)  # if the load fails
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Shard
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.state.optimizer import MOMENTS, parameter_names

_TORCH_NAMES = {stored: name for name, stored in MOMENTS.items()}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """What a checkpoint holds of an optimizer's states.

    Attributes:
        tensors: by key, without the prefix that the optimizer's keys have in their part.
        values: likewise, states that are no tensors.
        master_name: under which name the states held master weights, None if they did not.
        master_dtype: returns the dtype of a parameter's master weights, None if there are none.
    """

    tensors: Mapping[str, StoredTensor | SplitTensor]
    values: Mapping[str, Any]
    master_name: str | None
    master_dtype: Callable[[str], torch.dtype | None]


@dataclass(frozen=True, slots=True)
class AllocatedStates:
    """What `allocate_states` did.

    Attributes:
        states: what was added, as (parameter, name of the state), for `remove_states`.
        lost_masters: keys of parameters that have states, but no master weights.
    """

    states: list[tuple[torch.Tensor, str]]
    lost_masters: list[str]


def allocate_states(
    optimizer: torch.optim.Optimizer,
    stored: StoredStates,
    path: str,
    place: Callable[[str, torch.Tensor], Sequence[Shard]],
) -> AllocatedStates:
    """Give a fresh optimizer a place for every state that a checkpoint holds of its parameters.

    A state that is shaped like its parameter becomes zeros like it (a DTensor too), but of the
    stored dtype; any other tensor is whole, of the stored shape. Compressed moments become fp32.

    Args:
        place: returns the stored boxes of a parameter; their keys are looked up.
    """
    tensors, values = _by_parameter(stored.tensors), _by_parameter(stored.values)
    new: list[tuple[torch.Tensor, str, Any]] = []
    lost_masters: list[str] = []
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for name, parameter in zip(parameter_names(group, path), group["params"], strict=True):
            known = optimizer.state.get(parameter, {})
            boxes = place(name, parameter)
            box = next((b for b in boxes if b.key in tensors), None)
            found = {**values.get(name, {}), **(tensors[box.key] if box is not None else {})}
            for state, held in found.items():
                root, dot, _ = _TORCH_NAMES.get(state, state).partition(".")
                if root in known:
                    continue
                if dot:
                    raise CheckpointValueError(
                        f"{path}: the state {state!r} of {name!r} is in a collection, which only "
                        "the optimizer can make; let it take a step before the load"
                    )
                blank = _blank(parameter, box, state, held, on_device=on_device)
                new.append((parameter, root, blank))
            if stored.master_name is not None and boxes and stored.master_name not in known:
                dtype = stored.master_dtype(boxes[0].key)
                if dtype is not None:
                    new.append((parameter, stored.master_name, _like(parameter, dtype)))
                elif found:
                    lost_masters.append(boxes[0].key)
    for parameter, state, value in new:
        optimizer.state[parameter][state] = value
    return AllocatedStates([(parameter, state) for parameter, state, _ in new], lost_masters)


def _blank(
    parameter: torch.Tensor, box: Shard | None, state: str, stored: object, *, on_device: bool
) -> torch.Tensor | None:
    """Return memory for a stored state, None for one that is a value."""
    if not isinstance(stored, StoredTensor | SplitTensor):
        return None
    codes = state in _TORCH_NAMES and stored.dtype in ("I8", "U8")
    dtype = dtype_of("F32" if codes else stored.dtype).torch_dtype
    if box is not None and stored.shape == box.box.global_shape and state != "step":
        return _like(parameter, dtype)
    device = parameter.device if stored.shape or on_device else "cpu"
    return torch.zeros(stored.shape or (), dtype=dtype, device=device)


def remove_states(
    optimizer: torch.optim.Optimizer, added: Sequence[tuple[torch.Tensor, str]]
) -> None:
    """Undo `allocate_states`."""
    for parameter, state in added:
        optimizer.state[parameter].pop(state, None)
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]


def _by_parameter(stored: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    found: dict[str, dict[str, _T]] = {}
    for key, value in stored.items():
        name, slash, state = key.partition("/")
        if slash and "/" not in state:
            found.setdefault(name, {})[state] = value
    return found


def _like(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.preserve_format)

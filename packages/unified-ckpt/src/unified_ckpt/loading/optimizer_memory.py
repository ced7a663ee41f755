"""Memory for the stored states of a fresh optimizer, which has none before its first step.

added = allocate_states(optimizer, stored, names, on_device, keys_of)
remove_states(optimizer, added.states)  # if the load fails
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Shape
from unified_ckpt.geometry.layouts import is_dtensor
from unified_ckpt.geometry.tensors import dtype_of, is_wrapper
from unified_ckpt.plans import SplitTensor, StoredTensor
from unified_ckpt.state.naming import Names
from unified_ckpt.state.optimizer import MOMENTS

_TORCH_NAMES = {stored: name for name, stored in MOMENTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """What a checkpoint holds of an optimizer's states.

    Attributes:
        tensors: by key, without the prefix that the optimizer's keys have in their part.
        values: likewise, keys of states that are no tensors.
        structures: likewise, of collections with tensors, and of tensors made of others.
        master_name: under which name the states held master weights, None if they did not.
        master_dtype: returns the dtype of a parameter's master weights, None if there are none.
    """

    tensors: Mapping[str, StoredTensor | SplitTensor]
    values: Sequence[str]
    structures: Sequence[str]
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
    names: Sequence[Sequence[str]],
    on_device: Sequence[bool],
    keys_of: Callable[[str, torch.Tensor], Sequence[tuple[str, Shape]]],
) -> AllocatedStates:
    """Give a fresh optimizer a place for every state that a checkpoint holds of its parameters.

    A state that is shaped like its parameter becomes zeros like it (a DTensor too), but of the
    stored dtype; any other tensor is whole, of the stored shape. Compressed moments become fp32. A
    value, or what has a structure, is None until it is loaded.

    Args:
        names: of each group's parameters.
        on_device: of each group, whether its parameters count their steps on the device.
        keys_of: returns the stored keys of a parameter, and their shapes.
    """
    states = _by_parameter(stored)
    known_names = Names(states)
    new: list[tuple[torch.Tensor, str, Any]] = []
    lost_masters: list[str] = []
    for of_group, group, counts in zip(names, optimizer.param_groups, on_device, strict=True):
        for name, parameter in zip(of_group, group["params"], strict=True):
            known = optimizer.state.get(parameter, {})
            keys = keys_of(name, parameter)
            names_of = [(known_names.find(key), shape) for key, shape in keys]
            stored_name, shape = next((each for each in names_of if each[0]), ("", ()))
            own = known_names.find(name)  # a step is no part of an expert, under whose key it were
            found = {**states.get(own or "", {}), **states.get(stored_name or "", {})}
            for state, held in found.items():
                root, dot, _ = _TORCH_NAMES.get(state, state).partition(".")
                if root not in known:
                    _check_is_whole(name, state, dot)
                    blank = _blank(parameter, shape, state, held, on_device=counts)
                    new.append((parameter, root, blank))
            if stored.master_name is not None and keys and stored.master_name not in known:
                dtype = stored.master_dtype(keys[0][0])
                if dtype is not None:
                    new.append((parameter, stored.master_name, _like(parameter, dtype)))
                elif found:
                    lost_masters.append(keys[0][0])
    for parameter, state, value in new:
        optimizer.state[parameter][state] = value
    return AllocatedStates([(parameter, state) for parameter, state, _ in new], lost_masters)


def _blank(
    parameter: torch.Tensor, shape: Shape | None, state: str, stored: object, *, on_device: bool
) -> torch.Tensor | None:
    """Return memory for a stored state, None for one that is a value."""
    if not isinstance(stored, StoredTensor | SplitTensor):
        return None
    codes = state in _TORCH_NAMES and stored.dtype in ("I8", "U8")
    dtype = dtype_of("F32" if codes else stored.dtype).torch_dtype
    if stored.shape == shape and state != "step":
        return _like(parameter, dtype)
    device = "cpu" if state == "step" and not on_device else parameter.device  # as torch has it
    return torch.zeros(stored.shape or (), dtype=dtype, device=device)


def _check_is_whole(name: str, state: str, dot: str) -> None:
    if dot:
        raise CheckpointValueError(
            f"the state {state!r} of {name!r} is in a collection, which a checkpoint of this "
            "version does not describe; let the optimizer take a step before the load"
        )


def remove_states(
    optimizer: torch.optim.Optimizer, added: Sequence[tuple[torch.Tensor, str]]
) -> None:
    """Undo `allocate_states`."""
    for parameter, state in added:
        optimizer.state[parameter].pop(state, None)
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]


def _by_parameter(stored: StoredStates) -> dict[str, dict[str, Any]]:
    """Return by parameter and state what is stored: a tensor, or True for anything else."""
    found: dict[str, dict[str, Any]] = {}
    everything = {
        **dict.fromkeys(stored.values, True),
        **stored.tensors,
        **dict.fromkeys(stored.structures, True),
    }
    roots = set(stored.structures)
    for key, held in everything.items():
        name, slash, state = key.partition("/")
        if slash and "/" not in state:
            inside = state.split(".")
            outer = any(f"{name}/{'.'.join(inside[:n])}" in roots for n in range(1, len(inside)))
            if not outer:
                found.setdefault(name, {})[state] = held
    return found


def _like(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if is_wrapper(parameter) and not is_dtensor(parameter):  # its states are plain tensors
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.preserve_format)

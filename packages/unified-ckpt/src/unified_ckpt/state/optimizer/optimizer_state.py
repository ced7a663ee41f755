"""Optimizer states under their parameters' names: `w/moment1`, `w/moment2`, `w/step`.

torch numbers parameters, which means nothing under another layout, so names are looked for: those
of an optimizer made from `model.named_parameters()`, or of `get_optimizer_state_dict`, or those
that a module in the same state dict gives to the same parameters. Adam's `exp_avg` and
`exp_avg_sq` are stored as `moment1` and `moment2`, other states under torch's names, and fp32
copies of parameters in the part `master_weights`.

    names = group_names(optimizer, "optimizer", ModuleNames({"model": model}))
    entries, groups = optimizer_entries(optimizer, names)
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unified_ckpt.errors import CheckpointTypeError, CheckpointValueError
from unified_ckpt.state.naming import ModuleNames, plain_name

MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
MASTER_NAMES = frozenset({"master_weight", "master_weights", "master_param"})
MASTER_FIELD = "master_weight_state"  # a value: under which name states held master weights
_UNNAMED = (
    "{}: the optimizer numbers its parameters, which means nothing under another layout; put the "
    "module into the same state dict, or make the optimizer from model.named_parameters()"
)
# states that are shaped like their parameter
_SHAPED = frozenset({*MOMENTS, "momentum_buffer", "square_avg", "sum", "prev", "exp_inf", "ax"})
_ID_FIELDS = frozenset({"params", "param_names"})

Groups = list[MutableMapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One parameter of an optimizer: its name, its live state, and itself where it is known."""

    name: str
    state: MutableMapping[str, Any]
    parameter: torch.Tensor | None


def is_optimizer_state(value: object) -> bool:
    """Whether a value is an optimizer, or a state dict of one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return isinstance(value, Mapping) and set(value) == {"state", "param_groups"}


def optimizer_entries(
    optimizer: torch.optim.Optimizer | Mapping[str, Any], names: Sequence[Sequence[str]]
) -> tuple[list[Entry], Groups]:
    """Return the parameters, those without a state included, and the groups.

    Args:
        names: of each group's parameters, see `group_names`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        groups: Groups = list(optimizer.param_groups)
        state: Mapping[Any, MutableMapping[str, Any]] = optimizer.state
    else:
        groups, state = list(optimizer["param_groups"]), optimizer["state"]
    entries = [
        Entry(
            name=name,
            state=state.get(identity, {}),
            parameter=identity if isinstance(identity, torch.Tensor) else None,
        )
        for of_group, group in zip(names, groups, strict=True)
        for name, identity in zip(of_group, group["params"], strict=True)
    ]
    return entries, groups


def hyperparameters(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's fields that are not about which parameters it has."""
    return [name for name in group if name not in _ID_FIELDS]


def group_names(
    optimizer: torch.optim.Optimizer | Mapping[str, Any], path: str, modules: ModuleNames
) -> list[list[str]]:
    """Return the names of each group's parameters, in its order.

    A name of the optimizer's own that differs from the module's only by wrappers is the module's.

    Raises:
        CheckpointValueError: nothing names them.
        CheckpointTypeError: the optimizer keeps more than what torch's own keep.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_is_plain(optimizer, path)
        groups: Any = optimizer.param_groups
    else:
        groups = optimizer["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        if (
            len(groups) == 1
            and "param_names" not in groups[0]
            and numbers == [*range(len(numbers))]
        ):
            return [_names_by_order(optimizer["state"], len(numbers), path, modules)]
    pairs = [
        zip(group.get("param_names", group["params"]), group["params"], strict=True)
        for group in groups
    ]
    return [[_name_of(own, held, path, modules) for own, held in group] for group in pairs]


def _name_of(own: object, parameter: object, path: str, modules: ModuleNames) -> str:
    name = modules.of(parameter) if isinstance(parameter, torch.Tensor) else None
    if isinstance(own, str):
        if name is None or name == own or plain_name(name) != plain_name(own):
            return own
        return name
    if name is None:
        raise CheckpointValueError(_UNNAMED.format(path))
    return name


def _names_by_order(
    states: Mapping[Any, Mapping[str, Any]], count: int, path: str, modules: ModuleNames
) -> list[str]:
    """Name the parameters of an `optimizer.state_dict()`, which says their number and no more."""
    held = modules.in_order()
    if len(held) != count:
        held = [(name, parameter) for name, parameter in held if parameter.requires_grad]
    if len(held) != count:
        raise CheckpointValueError(_UNNAMED.format(path))
    for number, state in states.items():
        name, parameter = held[number]
        shapes = {tuple(state[each].shape) for each in _SHAPED.intersection(state)}
        if shapes - {tuple(parameter.shape)}:
            raise CheckpointValueError(
                f"{path}: parameter {number} has states of shape {min(shapes)}, but {name!r}, the "
                f"module's parameter of that number, is {tuple(parameter.shape)}; pass the "
                "optimizer itself"
            )
    return [name for name, _ in held]


def _check_is_plain(optimizer: torch.optim.Optimizer, path: str) -> None:
    """Refuse a class with a state of its own beside `state` and `param_groups`."""
    kind = type(optimizer)
    if kind.state_dict is torch.optim.Optimizer.state_dict:
        return
    try:
        given = optimizer.state_dict()
        count = len(given["state"])
    except (RuntimeError, KeyError, TypeError):
        given, count = {}, -1
    if given.keys() != {"state", "param_groups"} or count != len(optimizer.state):
        raise CheckpointTypeError(
            f"{path}: {kind.__name__} keeps more in its own state_dict() than states and groups; "
            "pass the optimizer that it wraps, and what else it keeps as values"
        )

"""Which algorithm updates a parameter, at which learning rate and with which weight decay; pure.

Invariant: a rule depends on the job and the parameter's name and shape, never on the layout.

    rules = update_rules({"model.norm.weight": (64,)}, config.optimizer, groups=[])
    rules["model.norm.weight"]          # UpdateRule("adamw", lr_ratio=1.0, weight_decay=0.0)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_train.config import OptimizerConfig, ParamGroupConfig
from moe_train.errors import TrainValueError
from moe_train.model import decays

_NO_HIDDEN_MATRIX = ("embed_tokens.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How one parameter is updated: its learning rate is `lr_ratio` times that of the step."""

    algorithm: Literal["adamw", "muon"]
    lr_ratio: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A `[param_groups.NAME]` and the names of all the decoder's parameters that it matches."""

    config: ParamGroupConfig
    names: frozenset[str]


def update_rules(
    shapes: Mapping[str, Sequence[int]], optimizer: OptimizerConfig, groups: Sequence[ParamGroup]
) -> dict[str, UpdateRule]:
    """The rule of each parameter in `shapes`, by name.

    Raises:
        ValueError: a parameter is in two groups, or muon is to update what is no matrix.
    """
    return {name: _rule(name, shape, optimizer, groups) for name, shape in shapes.items()}


def _rule(
    name: str, shape: Sequence[int], optimizer: OptimizerConfig, groups: Sequence[ParamGroup]
) -> UpdateRule:
    is_matrix = decays(name, shape)
    decay = optimizer.weight_decay if is_matrix else 0.0
    hidden = is_matrix and not name.endswith(_NO_HIDDEN_MATRIX)
    algorithm: Literal["adamw", "muon"] = optimizer.name if hidden else "adamw"
    found = [group.config for group in groups if name in group.names]
    if not found:
        return UpdateRule(algorithm, 1.0, decay)
    if len(found) > 1:
        raise TrainValueError(
            f"{name} is matched by {' and '.join(f'[{group.place}]' for group in found)}; a "
            "parameter has one group: narrow the patterns of one of them"
        )
    group = found[0]
    if group.algorithm == "muon" and not is_matrix:
        raise TrainValueError(
            f'{group.place}.algorithm="muon" updates matrices, and {name} with shape '
            f"{tuple(shape)} is none; narrow {group.place}.parameters"
        )
    return UpdateRule(
        group.algorithm or algorithm,
        group.lr_ratio,
        decay if group.weight_decay is None else group.weight_decay,
    )

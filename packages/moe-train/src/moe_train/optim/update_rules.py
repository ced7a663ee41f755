"""Which algorithm updates a parameter, at which learning rate and with which weight decay; pure.

Invariant: a rule depends on the job and the parameter's name and shape, never on the layout.

    rules = update_rules({"model.norm.weight": (64,)}, config, names={})
    rules["model.norm.weight"]          # UpdateRule("adamw", lr_ratio=1.0, weight_decay=0.0)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_train.config import Config
from moe_train.errors import TrainValueError
from moe_train.model import decays

_NO_HIDDEN_MATRIX = ("embed_tokens.weight", "head.weight")


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How one parameter is updated: its learning rate is `lr_ratio` times that of the step."""

    algorithm: Literal["adamw", "muon"]
    lr_ratio: float
    weight_decay: float


def update_rules(
    shapes: Mapping[str, Sequence[int]], config: Config, names: Mapping[str, Collection[str]]
) -> dict[str, UpdateRule]:
    """The rule of each parameter in `shapes`, by name.

    Args:
        names: of each `[param_groups.NAME]`, the parameters of the decoder that it matches.

    Raises:
        ValueError: a parameter is in two groups, or muon is to update what is no matrix.
    """
    return {name: _rule(name, shape, config, names) for name, shape in shapes.items()}


def _rule(
    name: str, shape: Sequence[int], config: Config, names: Mapping[str, Collection[str]]
) -> UpdateRule:
    optimizer = config.optimizer
    is_matrix = decays(name, shape)
    decay = optimizer.weight_decay if is_matrix else 0.0
    hidden = is_matrix and not name.endswith(_NO_HIDDEN_MATRIX)
    algorithm: Literal["adamw", "muon"] = optimizer.name if hidden else "adamw"
    found = [group for group in config.param_groups if name in names[group.name]]
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

"""The tables that say how parameters are updated.

OptimizerConfig(lr=3e-4, name="muon", decay="wsd", wsd_decay_steps=100)
ParamGroupConfig(name="routers", parameters=("*.mlp.gate.weight",), lr_ratio=0.1)
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import Table, key
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Table):
    """The algorithm, the learning rate of every step, and clipping by the global norm."""

    table: ClassVar[str] = "optimizer"
    name: Literal["adamw", "muon"] = key(
        "adamw for all parameters; or muon for matrices (each expert's own, and routers) and adamw "
        "for embeddings, the head, norms and biases",
        default="adamw",
        on_resume="asked",
    )
    lr: float = key("peak learning rate", above=0, on_resume="free")
    min_lr_ratio: float = key(
        "learning rate at the end of the decay",
        unit="fraction of lr",
        default=0.1,
        minimum=0,
        maximum=1,
        on_resume="free",
    )
    warmup_steps: int = key(
        "steps in which the learning rate rises from 0 to lr",
        unit="steps",
        default=0,
        minimum=0,
        on_resume="free",
    )
    decay: Literal["cosine", "linear", "constant", "wsd"] = key(
        "shape of the learning rate after the warm-up; wsd: it stays at lr, and falls in the last "
        "wsd_decay_steps",
        default="cosine",
        on_resume="free",
    )
    wsd_decay_steps: int | None = key(
        'steps before the end in which the rate of decay="wsd" falls',
        unit="steps",
        default=None,
        minimum=1,
        on_resume="free",
    )
    wsd_decay_style: Literal["linear", "cosine", "minus_sqrt", "exponential"] = key(
        'how the rate of decay="wsd" falls; minus_sqrt: 1 - sqrt(progress)',
        default="minus_sqrt",
        on_resume="free",
    )
    decay_steps: int | None = key(
        "step at which the decay ends; absent: max_steps of the first run",
        unit="steps",
        default=None,
        minimum=1,
        on_resume="free",
    )
    on_extend: Literal["constant", "rewarm", "restretch"] = key(
        "learning rate of a resumed run with another max_steps: go on along the first run's curve "
        "and then hold its end; rise again over warmup_steps and decay until max_steps; or take "
        "the curve of a run that had this max_steps from its start",
        default="constant",
        on_resume="free",
    )
    weight_decay: float = key("decoupled weight decay", default=0.1, minimum=0, on_resume="asked")
    beta1: float = key(
        "decay of the mean of gradients",
        default=0.9,
        minimum=0,
        maximum=0.999999,
        on_resume="asked",
    )
    beta2: float = key(
        "decay of the mean of squared gradients",
        default=0.95,
        minimum=0,
        maximum=0.9999999,
        on_resume="asked",
    )
    eps: float = key(
        "added to the root of the second moment", default=1e-8, above=0, on_resume="asked"
    )
    muon_momentum: float = key(
        "decay of muon's sum of gradients (Nesterov's form)",
        default=0.95,
        minimum=0,
        maximum=0.999999,
        on_resume="asked",
    )
    max_grad_norm: float = key(
        "gradients are scaled down to this global norm; inf for no limit",
        default=1.0,
        above=0,
        maximum=math.inf,
        on_resume="free",
    )

    def _check(self) -> None:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise TrainValueError(
                f"optimizer.decay_steps={self.decay_steps} ends the decay before "
                f"optimizer.warmup_steps={self.warmup_steps} are over; it counts from the first "
                "step of the run"
            )
        if (self.decay == "wsd") != (self.wsd_decay_steps is not None):
            raise TrainValueError(
                'optimizer.decay="wsd" and optimizer.wsd_decay_steps belong together; got decay='
                f'"{self.decay}", wsd_decay_steps={self.wsd_decay_steps}; give both or none'
            )
        if self.decay == "wsd" and self.wsd_decay_style == "exponential" and not self.min_lr_ratio:
            raise TrainValueError(
                'optimizer.wsd_decay_style="exponential" never reaches optimizer.min_lr_ratio=0; '
                "set a ratio above 0 or another style"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroupConfig(Table):
    """Parameters with a learning rate, a weight decay or an algorithm of their own."""

    table: ClassVar[str] = "param_groups.NAME"
    name: str
    parameters: tuple[str, ...] = key(
        "patterns of the group's parameters, as in train.trainable", on_resume="asked"
    )
    lr_ratio: float = key(
        "the group's learning rate",
        unit="times that of the step",
        default=1.0,
        minimum=0,
        on_resume="free",
    )
    weight_decay: float | None = key(
        "of every parameter of the group, norms and biases too; absent: as optimizer.weight_decay "
        "says, on matrices only",
        default=None,
        minimum=0,
        on_resume="asked",
    )
    algorithm: Literal["adamw", "muon"] | None = key(
        "of the group, instead of what optimizer.name gives", default=None, on_resume="asked"
    )

    @property
    def place(self) -> str:
        """The table's name in the file."""
        return f"param_groups.{self.name}"

    def _check(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise TrainValueError(
                f"[param_groups.{self.name}] is no name of a group; use letters, digits, _ and -"
            )
        if not self.parameters or not all(self.parameters):
            raise TrainValueError(
                f"{self.place}.parameters={list(self.parameters)} names none; give patterns such "
                'as "*.mlp.gate.weight"'
            )

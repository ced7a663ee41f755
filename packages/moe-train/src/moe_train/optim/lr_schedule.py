"""The learning rate of every step, as a form that a checkpoint keeps.

Invariant: a resumed run has the rates of the run that it continues, unless the job asks for others;
then the form that it makes is the one that is saved.

    schedule = LrSchedule.of(config.optimizer, max_steps=100)
    schedule.rate(1)
    schedule.resumed(100, config.optimizer, max_steps=200)      # after 100 finished steps
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moe_train.config import OptimizerConfig
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSchedule:
    """Linear warm-up from `start_lr` behind step `start_step`, decay until `decay_steps`, its end.

    Attributes:
        lr: the rate at the end of the warm-up.
        min_lr_ratio: the rate at the end of the decay, as a fraction of `lr`.
        warmup_steps: steps of the warm-up, counted from `start_step`.
        decay: `cosine`, `linear`, `constant` or `wsd`.
        decay_steps: the step of the run at which the decay ends.
        wsd_decay_steps: of `wsd`, how many steps before that the rate begins to fall; 0 for others.
        wsd_decay_style: how it falls (those of MiniCPM, arXiv 2404.06395, and arXiv 2405.18392).
        max_steps: last step of the run that the form was made for.
        start_step, start_lr: where a later warm-up began; 0 for the first one.
    """

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay: str
    decay_steps: int
    max_steps: int
    start_step: int = 0
    start_lr: float = 0.0
    wsd_decay_steps: int = 0
    wsd_decay_style: str = "minus_sqrt"

    @classmethod
    def of(cls, optimizer: OptimizerConfig, max_steps: int) -> "LrSchedule":
        """The form of a run that begins with its first step."""
        return cls(
            lr=optimizer.lr,
            min_lr_ratio=optimizer.min_lr_ratio,
            warmup_steps=optimizer.warmup_steps,
            decay=optimizer.decay,
            decay_steps=optimizer.decay_steps or max_steps,
            max_steps=max_steps,
            wsd_decay_steps=optimizer.wsd_decay_steps or 0,
            wsd_decay_style=optimizer.wsd_decay_style,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LrSchedule":
        """Read what `asdict` made.

        Raises:
            KeyError, TypeError, ValueError: it is no such form.
        """
        if extra := values.keys() - {item.name for item in fields(cls)}:
            raise TrainValueError(f"unknown keys of the schedule: {sorted(extra)}")
        now = {"wsd_decay_steps": 0, "wsd_decay_style": "minus_sqrt", **values}
        return cls(**{item.name: item.type(now[item.name]) for item in fields(cls)})  # type: ignore[operator]

    def rate(self, step: int) -> float:
        """The learning rate of update number `step` of the run, from 1."""
        done = step - self.start_step
        if self.warmup_steps and done <= self.warmup_steps:
            return self.start_lr + (self.lr - self.start_lr) * done / self.warmup_steps
        if self.decay == "constant":
            return self.lr
        span = max(1, self.decay_steps - self.start_step - self.warmup_steps)
        fallen, style = done - self.warmup_steps, self.decay
        if style == "wsd":
            held = max(0, span - self.wsd_decay_steps)
            fallen, span, style = max(0, fallen - held), span - held, self.wsd_decay_style
        return self.lr * self._left(style, min(1.0, fallen / span))

    def _left(self, style: str, progress: float) -> float:
        """The fraction of `lr` that is left when this part of the fall is over."""
        if style == "exponential":
            return float(self.min_lr_ratio**progress)
        shape = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }[style]
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * shape

    @property
    def end(self) -> float:
        """The rate that stays when the decay is over."""
        return self.lr if self.decay == "constant" else self.lr * self.min_lr_ratio

    def resumed(self, step: int, optimizer: OptimizerConfig, max_steps: int) -> "LrSchedule":
        """The form with which a run goes on after `step` finished steps.

        The job's `lr`, `min_lr_ratio`, `warmup_steps`, `decay` and, where it is given,
        `decay_steps` hold. With another `max_steps` than before, `optimizer.on_extend` says what
        becomes of the curve; otherwise it stays.

        Raises:
            ValueError: a new warm-up has no steps, or does not end before the decay does.
        """
        now = LrSchedule.of(optimizer, max_steps)
        kept = optimizer.decay_steps or self.decay_steps
        now = replace(now, start_step=self.start_step, start_lr=self.start_lr, decay_steps=kept)
        if max_steps == self.max_steps or optimizer.on_extend == "constant":
            return now
        end = optimizer.decay_steps or max_steps
        if optimizer.on_extend == "restretch":
            return replace(now, decay_steps=end)
        if not 0 < optimizer.warmup_steps < end - step:
            raise TrainValueError(
                f'optimizer.on_extend="rewarm" after step {step} needs optimizer.warmup_steps '
                f"between 1 and {end - step - 1}, got {optimizer.warmup_steps}; the decay ends at "
                f"step {end}"
            )
        return replace(now, start_step=step, start_lr=self.rate(step), decay_steps=end)

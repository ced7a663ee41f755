"""When a run saves and what it keeps, checked once.

options = ManagerOptions(save_steps=500, save_total_limit=3)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.signals import DEFAULT_SIGNALS, Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """When to save and what to keep; the same on every rank.

    Attributes:
        save_steps: save when the step is a multiple of it; None for never.
        save_minutes: save when so many minutes have passed since the last save, or since a decision
            for one, by the clock of the group's first rank; None for never.
        save_total_limit: how many of the newest checkpoints stay; None for all.
        best_metric: name of the metric whose best checkpoint stays as well; None for none.
        best_mode: whether the best is the least (`min`) or the greatest (`max`).
        signals: which signals ask for a save; SIGTERM and SIGINT ask to stop after it as well.
        timeout_s: bound on each wait for the other ranks.
        lease_s: in a store, how long a job may be silent before another one may have the folder.

    Raises:
        CheckpointValueError: a number is not positive, or `best_mode` is unknown.
    """

    save_steps: int | None = None
    save_minutes: float | None = None
    save_total_limit: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    signals: Sequence[Signals] = DEFAULT_SIGNALS
    timeout_s: float = 1800.0
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("save_steps", "save_minutes", "save_total_limit", "timeout_s", "lease_s"):
            value = getattr(self, name)
            if value is None and name.startswith("save_"):
                continue
            real = () if name in ("save_steps", "save_total_limit") else (float,)
            check_type(name, value, int, *real)
            if not value > 0:
                raise CheckpointValueError(f"{name}={value!r} must be positive")
        if self.best_mode not in ("min", "max"):
            raise CheckpointValueError(f"best_mode={self.best_mode!r}; expected 'min' or 'max'")

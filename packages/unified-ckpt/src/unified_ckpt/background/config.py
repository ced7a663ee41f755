"""How a saver works: sizes and bounds, checked once.

AsyncSaver(config=AsyncSaverConfig(ema=EmaConfig(decay=0.999)))
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_ckpt.errors import CheckpointValueError, as_path, check_type
from unified_ckpt.snapshots.average import EmaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSaverConfig:
    """How a saver works.

    Attributes:
        num_buffers: snapshots that may wait or be written at a time; each costs the state's size.
        backpressure_timeout_s: how long a save waits for a free buffer before it raises; 0 raises
            at once.
        timeout_s: bound on each wait of the saver processes for each other.
        start_timeout_s: bound on the start of a saver process.
        orphan_grace_s: how long a save under way may go on after its trainer has died.
        niceness: of the saver process; the trainer's computation goes first.
        ema: keep a moving average of the snapshots; None for none.
        fast_tier: a folder on a tmpfs of this machine, where every checkpoint is committed first,
            under its name; None for none. All ranks must be on one machine.
        fast_tier_keep: checkpoints that stay there; one more is there during a save.
        store_host: name of the first rank's machine as the others reach it; None asks that machine.
    """

    num_buffers: int = 2
    backpressure_timeout_s: float = 600.0
    timeout_s: float = 1800.0
    start_timeout_s: float = 120.0
    orphan_grace_s: float = 60.0
    niceness: int = 5
    ema: EmaConfig | None = None
    fast_tier: Path | str | None = None
    fast_tier_keep: int = 1
    store_host: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_buffers", "backpressure_timeout_s", "orphan_grace_s", "niceness"):
            check_type(name, getattr(self, name), int, float)
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            check_type(name, value, int, float)
            if not (math.isfinite(value) and value > 0):
                raise CheckpointValueError(f"{name}={value} must be a positive number of seconds")
        if not math.isfinite(self.backpressure_timeout_s):
            raise CheckpointValueError(
                f"backpressure_timeout_s={self.backpressure_timeout_s} must be a finite number of "
                "seconds; no wait is unbounded"
            )
        for name in ("backpressure_timeout_s", "orphan_grace_s", "niceness"):
            if not getattr(self, name) >= 0:
                raise CheckpointValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("num_buffers", "fast_tier_keep"):
            if getattr(self, name) < 1:
                raise CheckpointValueError(f"{name}={getattr(self, name)} must be at least 1")

    def to_json(self) -> dict[str, Any]:
        """Return what the saver process must know, as JSON types."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        tier = None if self.fast_tier is None else as_path("fast_tier", self.fast_tier)
        return fields | {
            "fast_tier": None if tier is None else os.path.realpath(tier),
            "ema": (self.ema or EmaConfig()).to_json(),
        }

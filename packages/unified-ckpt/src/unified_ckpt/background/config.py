"""How a saver works: sizes and bounds, checked once.

AsyncSaver(config=AsyncSaverConfig(ema=EmaConfig(decay=0.999)))
"""

import math
from dataclasses import dataclass
from typing import Any

from unified_ckpt.errors import CheckpointValueError, check_type
from unified_ckpt.snapshots.average import EmaConfig
from unified_ckpt.tiers import TierOptions


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
        tier: where every checkpoint is saved first, on the nodes themselves, with copies on others;
            the storage gets it behind. None for none.
        store_host: name of the first rank's machine as the others reach it; None asks that machine.
    """

    num_buffers: int = 2
    backpressure_timeout_s: float = 600.0
    timeout_s: float = 1800.0
    start_timeout_s: float = 120.0
    orphan_grace_s: float = 60.0
    niceness: int = 5
    ema: EmaConfig | None = None
    tier: TierOptions | None = None
    store_host: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_buffers", "niceness"):
            check_type(name, getattr(self, name), int)
        for name in ("backpressure_timeout_s", "orphan_grace_s"):
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
        if self.num_buffers < 1:
            raise CheckpointValueError(f"num_buffers={self.num_buffers} must be at least 1")
        check_type("tier", self.tier, TierOptions, type(None))

    def to_json(self) -> dict[str, Any]:
        """Return what the saver process must know, as JSON types."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {
            "tier": None if self.tier is None else self.tier.to_json(),
            "ema": (self.ema or EmaConfig()).to_json(),
        }

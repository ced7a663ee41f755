"""The tables that say what a run leaves behind: checkpoints and reports.

CheckpointConfig(interval_steps=100)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import Table, key


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Table):
    """When checkpoints are written and how many are kept."""

    table: ClassVar[str] = "checkpoint"
    interval_steps: int | None = key(
        "steps between checkpoints; absent: only at the end, or when the job is stopped",
        unit="steps",
        default=None,
        minimum=1,
    )
    save_total_limit: int = key(
        "newest checkpoints to keep", unit="checkpoints", default=2, minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Table):
    """What is reported, where and how often."""

    table: ClassVar[str] = "log"
    interval_steps: int = key(
        "steps between lines of metrics.jsonl", unit="steps", default=1, minimum=1
    )
    tensorboard: bool = key("also write TensorBoard event files", default=True)
    plots: bool = key("write loss.png and expert_load.png at the end", default=True)
    progress: Literal["auto", "live", "plain", "off"] = key(
        "how progress is shown; auto is live on a terminal and plain lines elsewhere",
        default="auto",
    )

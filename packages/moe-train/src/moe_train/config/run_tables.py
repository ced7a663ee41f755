"""The tables that say what a run leaves behind, and whose memory it runs in.

CheckpointConfig(interval_steps=100)
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from moe_train.config.keys import PATH, Table, key
from moe_train.errors import TrainValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Table):
    """When checkpoints are written and how many are kept."""

    table: ClassVar[str] = "checkpoint"
    interval_steps: int | None = key(
        "steps between checkpoints, beside those of interval_minutes; absent: no such interval",
        unit="steps",
        default=None,
        minimum=1,
        on_resume="free",
    )
    interval_minutes: float = key(
        "time between checkpoints, by the clock of rank 0; inf: no such interval",
        unit="minutes",
        default=30.0,
        above=0,
        maximum=math.inf,
        on_resume="free",
    )
    stop_on_save_error: bool = key(
        "end the run when a checkpoint cannot be written; false trains on and tries again at the "
        "next interval",
        default=False,
        on_resume="free",
    )
    save_total_limit: int = key(
        "newest checkpoints to keep", unit="checkpoints", default=2, minimum=1, on_resume="free"
    )
    keep_best: bool = key(
        "after each validation with the lowest loss so far write a checkpoint, and keep that one "
        "beside the newest ones",
        default=False,
        on_resume="free",
    )
    save_mode: Literal["sync", "async", "zero_cost"] = key(
        "sync: training waits until a checkpoint is written; async: only until the state is "
        "copied, for a process beside it to write; zero_cost: the copy is made in pieces between "
        "the microbatches of the next step. The last two take memory for two more states",
        default="sync",
        on_resume="free",
    )
    moments: Literal["exact", "int8"] = key(
        "AdamW's two moments in checkpoints and node_folder: exact: as they are; int8: one byte an "
        "element and a scale for each 64, so that a resume does not go on bit for bit; weights and "
        "master weights stay exact. Read in any form, whatever this says",
        default="exact",
        on_resume="free",
    )
    ema_decay: float | None = key(
        "weight of the old value in an fp32 moving average of the weights, kept beside training "
        '(save_mode="zero_cost") and in every checkpoint; absent: none',
        default=None,
        minimum=0,
        maximum=0.999999,
        on_resume="free",
    )
    ema_interval_steps: int = key(
        "steps between updates of the moving average",
        unit="steps",
        default=1,
        minimum=1,
        on_resume="free",
    )
    node_folder: str | None = key(
        "folder of each node for itself (a tmpfs such as /dev/shm, a local disk) for states "
        "between checkpoints, with copies on other nodes; absent: none",
        unit=PATH,
        default=None,
        on_resume="free",
    )
    node_interval_steps: int = key(
        "steps between states in node_folder", unit="steps", default=10, minimum=1, on_resume="free"
    )
    node_copies: int = key(
        "other nodes that hold a copy of each node's state; so many may be lost at once",
        unit="nodes",
        default=1,
        minimum=0,
        on_resume="free",
    )

    def _check(self) -> None:
        if self.ema_decay is None:
            return
        if self.save_mode != "zero_cost":
            raise TrainValueError(
                f"checkpoint.ema_decay={self.ema_decay} needs a copy of the weights beside "
                f"training, which checkpoint.save_mode={self.save_mode!r} does not make; set "
                'checkpoint.save_mode="zero_cost"'
            )
        if self.node_folder is not None:
            raise TrainValueError(
                "states in checkpoint.node_folder hold no moving average, so that a resume from "
                "one would begin it anew; leave out checkpoint.ema_decay or checkpoint.node_folder"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Table):
    """What is reported, where and how often."""

    table: ClassVar[str] = "log"
    dir: str | None = key(
        "folder for metrics, plots, run.json and the run's lock; absent: train.output_dir",
        unit=PATH,
        default=None,
        on_resume="free",
    )
    interval_steps: int = key(
        "steps between lines of metrics.jsonl", unit="steps", default=1, minimum=1, on_resume="free"
    )
    sent_bytes: bool = key(
        "count the bytes that rank 0 sends in each step's exchanges, by kind, as `plan` forecasts "
        "them: dispatch, experts (etp), attention (cp), tensor (tp)",
        default=False,
        on_resume="free",
    )
    tensorboard: bool = key("also write TensorBoard event files", default=True, on_resume="free")
    plots: bool = key(
        "write loss.png and expert_load.png at the end", default=True, on_resume="free"
    )
    progress: Literal["auto", "live", "plain", "off"] = key(
        "how progress is shown; auto is live on a terminal and plain lines elsewhere",
        default="auto",
        on_resume="free",
    )

    def _check(self) -> None:
        if self.dir is not None and "://" in self.dir:
            raise TrainValueError(
                f"log.dir is a {self.dir.partition(':')[0]}:// URL, but metrics are appended to "
                "and a lock is held there; name a directory"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(Table):
    """Who serves the memory of CUDA devices, and whether it is recorded."""

    table: ClassVar[str] = "memory"
    allocator: Literal["torch", "gpu-alloc"] = key(
        "who serves the tensors of CUDA devices: torch's caching allocator, or gpu-alloc in its "
        "place (gpu_alloc.torch.replace)",
        default="torch",
        on_resume="free",
    )
    settings: str | None = key(
        "gpu-alloc's settings as in GPU_ALLOC_CONF, key:value,key:value; absent: those of "
        "settings_file, else of that variable",
        default=None,
        on_resume="free",
    )
    settings_file: str | None = key(
        "file with gpu-alloc's settings, as `gpu-alloc tune -o` writes it",
        unit=PATH,
        default=None,
        on_resume="free",
    )
    record: bool = key(
        "record what each rank allocates, for `gpu-alloc explain` and `tune`: of the building and "
        "of the last three steps, in the folder memory beside the metrics. Steps take longer",
        default=False,
        on_resume="free",
    )

    def _check(self) -> None:
        given = {"settings": self.settings, "settings_file": self.settings_file}
        names = [name for name, value in given.items() if value is not None]
        if len(names) == 2:
            raise TrainValueError(
                "memory.settings and memory.settings_file are both given; leave out one of them"
            )
        if names and self.allocator != "gpu-alloc":
            raise TrainValueError(
                f'memory.{names[0]} is for memory.allocator="gpu-alloc", not for '
                f'"{self.allocator}"; set that, or leave it out'
            )

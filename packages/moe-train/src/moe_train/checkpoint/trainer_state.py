"""Where a run stands: `trainer_state.json` of a checkpoint.

Invariant: files of every earlier version are read; those of a later one are refused by number. A
field that came later has a default, which stands for "not known".

    state = read_state(Path("runs/a/checkpoint-100"))
    state.step, state.schedule
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moe_train.checkpoint.own_files import own_job
from moe_train.config import STATE_FILE
from moe_train.data import Ledger
from moe_train.errors import TrainValueError
from moe_train.optim import LrSchedule
from unified_ckpt import CheckpointError, load_files
from unified_ckpt.files.storage import Location
from unified_ckpt.run import CorruptCheckpointError, ReplacedCheckpointError, StoreError

STATE_VERSION = 5
"""1 had no `version`, no schedule and no losses; 2 nothing about the experts' places and rows; 3 no
moments in other forms; 4 no beginning of a mixture's turns.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands; `consumed_samples` is the position in the data.

    `data_fingerprint`, `sequence_length` and `seed` fix what sample number n is: resuming with
    others trains on other data.

    Attributes:
        step: finished steps; `skipped_steps` of them left out their update.
        schedule: the learning rate of every step; None in a file of version 1.
        recent_losses: of the last steps, oldest first, for the guard against spikes.
        best_validation_loss: the lowest so far; None: none yet, or not known.
        skips_in_row: steps at the end of the run whose updates were left out.
        expert_parts: where the experts lie, as in `parallel.expert_parts`; none: in equal parts.
        expert_rows: routed rows of each layer and expert since the layout changed last.
        moments: how the checkpoint stores AdamW's, as in `checkpoint.moments`.
        mixture_begin: from where sources take turns, so that a resume need not find it.
        ledger: which samples each step has used; a file of its own in a checkpoint.
        version: of the file that it was read from.
    """

    step: int
    consumed_samples: int
    data_fingerprint: str
    sequence_length: int
    seed: int
    schedule: LrSchedule | None = None
    skipped_steps: int = 0
    skips_in_row: int = 0
    recent_losses: tuple[float, ...] = ()
    best_validation_loss: float | None = None
    expert_parts: tuple[str, ...] = ()
    expert_rows: tuple[tuple[int, ...], ...] = ()
    moments: str = "exact"
    mixture_begin: tuple[int, ...] = ()
    ledger: Ledger = field(default_factory=Ledger, compare=False)
    version: int = STATE_VERSION

    @classmethod
    def from_json(cls, text: bytes, source: Path | Location) -> "TrainerState":
        """Parse `trainer_state.json`.

        Raises:
            ValueError: it is not what this version or an earlier one writes.
        """
        file = source / STATE_FILE
        try:
            values = dict(json.loads(text))
            version = int(values.setdefault("version", 1))
            state = cls(**_parsed(values)) if version <= STATE_VERSION else None
        except (KeyError, TypeError, ValueError) as error:
            raise TrainValueError(f"{file} is not a trainer state: {error!r}") from error
        if state is None:
            raise TrainValueError(
                f"{file} has version {version}, this moe-train reads versions up to "
                f"{STATE_VERSION}; resume with the moe-train that wrote it, or a later one"
            )
        return state

    def to_json(self) -> bytes:
        """The content of `trainer_state.json`."""
        values = asdict(replace(self, version=STATE_VERSION, ledger=Ledger()))
        del values["ledger"]
        return (json.dumps(values, indent=2) + "\n").encode()


def read_state(source: Path | Location) -> TrainerState:
    """The trainer state of a checkpoint.

    A file without a schedule gets that of the checkpoint's own job, if this version can read it.

    Raises:
        ValueError: the folder is not a checkpoint of this trainer.
        CheckpointError: the file is damaged, or was replaced while it was read.
    """
    try:
        text = load_files(source, STATE_FILE)
    except (CorruptCheckpointError, ReplacedCheckpointError, StoreError):
        raise  # a resume takes another checkpoint, or ends
    except CheckpointError as error:
        raise TrainValueError(
            f"{source} is not a training checkpoint ({error}); "
            "to start from weights alone set model.init_from"
        ) from error
    state = TrainerState.from_json(text, source)
    return state if state.schedule is not None else replace(state, schedule=_own_schedule(source))


def _own_schedule(source: Path | Location) -> LrSchedule | None:
    own = own_job(source)
    return None if own is None else LrSchedule.of(own.optimizer, own.train.max_steps)


def may_lack_moments(source: Path | Location) -> bool:
    """Whether some parameters may have no moments of AdamW, by the checkpoint's own job: they were
    frozen, or another algorithm updated them.
    """
    own = own_job(source)
    if own is None:
        return False
    algorithms = {own.optimizer.name, *(group.algorithm for group in own.param_groups)}
    # Layers for multi-token prediction are kept as they are where they are not trained.
    return bool(own.train.trainable) or "muon" in algorithms or own.train.mtp_loss_coef == 0


def _schedule(values: Any) -> LrSchedule | None:
    return None if values is None else LrSchedule.from_json(values)


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(map(float, values))


_READ: Mapping[str, Callable[[Any], Any]] = {
    "data_fingerprint": str,
    "moments": str,
    "schedule": _schedule,
    "recent_losses": _numbers,
    "mixture_begin": lambda numbers: tuple(map(int, numbers)),
    "expert_parts": lambda texts: tuple(map(str, texts)),
    "expert_rows": lambda rows: tuple(tuple(map(int, row)) for row in rows),
    "best_validation_loss": lambda value: None if value is None else float(value),
}
"""How fields that are no integers are read."""


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    if extra := values.keys() - {item.name for item in fields(TrainerState)}:
        raise TrainValueError(f"unknown keys {sorted(extra)}")
    return {name: _READ.get(name, int)(value) for name, value in values.items()}

"""What a training checkpoint holds, and how it is written and read under any layout.

`checkpoint-N` is a transformers checkpoint (weights under canonical keys, `config.json`,
`generation_config.json`, tokenizer) and beside it the optimizer moments, fp32 master weights,
`trainer_state.json`, and the random state of every rank. unified-ckpt publishes it with one rename.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from moe_train.config import STATE_FILE
from moe_train.errors import TrainValueError
from moe_train.layout import (
    ParameterLayout,
    StoredTensors,
    fill_new_rows,
    first_rows,
    stored_tensors,
)
from moe_train.optim import AdamW
from unified_ckpt import (
    CheckpointError,
    CheckpointManager,
    ManagerOptions,
    load,
    load_files,
    random_state_files,
    read_index,
    restore_random_state,
)
from unified_ckpt.folders import find_fault, numbered_checkpoints

_NOTHING_TO_RESUME = (
    "--resume: {} holds no complete checkpoint; start without --resume, or name one"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands; `consumed_samples` is the position in the data.

    `data_fingerprint`, `sequence_length` and `seed` fix what sample number n is: resuming with
    others would silently train on other data.
    """

    step: int
    consumed_samples: int
    data_fingerprint: str
    sequence_length: int
    seed: int

    @classmethod
    def from_json(cls, text: bytes, source: Path) -> "TrainerState":
        """Parse `trainer_state.json`.

        Raises:
            ValueError: it is not what this version writes.
        """
        try:
            values = json.loads(text)
            return cls(**{item.name: item.type(values[item.name]) for item in fields(cls)})  # type: ignore[operator]
        except (KeyError, TypeError, ValueError) as error:
            raise TrainValueError(
                f"{source / STATE_FILE} is not a trainer state: {error!r}"
            ) from error


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and loads this rank's part of the run. Close it when the run ends.

    The folder is locked for this job from the first collective call until `close`.

    Args:
        folder: where `checkpoint-N` folders go.
        rank: of this process in the job.
        parameters: name -> this rank's parameter or buffer, with `layouts` of the same names.
        files: what a transformers checkpoint holds beside weights; written by rank 0.
        options: when to save, and how many checkpoints to keep.
    """

    folder: Path
    rank: int
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, ParameterLayout]
    optimizer: AdamW
    files: Mapping[str, bytes]
    options: ManagerOptions
    _opened: CheckpointManager | None = field(default=None, init=False)

    @property
    def manager(self) -> CheckpointManager:
        """The run's folder. Collective when it is first asked for."""
        if self._opened is None:
            self._opened = CheckpointManager(self.folder, self.options)
        return self._opened

    def close(self) -> None:
        """Release the folder."""
        if self._opened is not None:
            self._opened.close()

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`. Collective."""
        return self.manager.decide(step).save

    def save(self, state: TrainerState) -> Path:
        """Write `checkpoint-{step}`, complete or not at all; remove old ones. Collective."""
        text = json.dumps(asdict(state), indent=2) + "\n"
        parts = {
            "model": self._stored(self.parameters).shards,
            "optimizer": [shard for moment in self._moments() for shard in moment.shards],
        }
        if self.optimizer.master:
            parts["master_weights"] = self._stored(self.optimizer.master).shards
        self.manager.save(
            parts,
            state.step,
            files={**self.files, STATE_FILE: text.encode()},
            rank_files=random_state_files(self.rank),
        )
        return self.folder / f"checkpoint-{state.step}"

    def resume(self) -> TrainerState:
        """Load the newest complete checkpoint, the same one on all ranks. Collective.

        Raises:
            ValueError: there is none.
        """
        found = self.manager.resume(self.load)
        if found is None:
            raise TrainValueError(_NOTHING_TO_RESUME.format(self.folder))
        return found[1]

    def load(self, source: Path) -> TrainerState:
        """Restore weights, optimizer, and this rank's random state if the checkpoint has it.

        Raises:
            ValueError: a key, shape or dtype differs; the message names it.
        """
        read_part(source, "model", [self._stored(self.parameters)])
        read_part(source, "optimizer", self._moments())
        if self.optimizer.master and has_part(source, "master_weights"):
            read_part(source, "master_weights", [self._stored(self.optimizer.master)])
        else:
            self.optimizer.master_from_parameters()
        state = read_state(source)
        self.optimizer.set_step(state.step)
        if not restore_random_state(source, self.rank):
            _restore_former_random_state(source, self.rank)
        return state

    def load_weights(self, source: Path) -> None:
        """Start from the weights of a transformers checkpoint, cast to this run's dtype.

        Rows of vocabulary that it does not have become the mean of those that it has.

        Raises:
            ValueError: it has more rows than the model, or a tensor does not fit.
        """
        layouts, tensors = first_rows(self.layouts, self.parameters, source)
        read_part(source, "model", [stored_tensors(layouts, tensors, self.rank)], cast=True)
        fill_new_rows(self.parameters, source)
        self.optimizer.master_from_parameters()

    def _stored(self, tensors: Mapping[str, Tensor], suffix: str = "") -> StoredTensors:
        return stored_tensors(self.layouts, tensors, self.rank, suffix)

    def _moments(self) -> list[StoredTensors]:
        return [
            self._stored(tensors, f"/{moment}")
            for moment, tensors in self.optimizer.moments().items()
        ]


def read_part(
    source: Path, part: str, stored: Sequence[StoredTensors], *, cast: bool = False
) -> None:
    """Fill this rank's tensors from one part of a checkpoint.

    Args:
        cast: convert what is stored in another dtype instead of refusing it.

    Raises:
        ValueError: a key, shape or dtype differs; the message names it.
    """
    shards = [shard for tensors in stored for shard in tensors.shards]
    load(shards, checkpoint_id=source, part=part, cast=cast)
    for tensors in stored:
        tensors.write_back()


def read_state(source: Path) -> TrainerState:
    """The trainer state of a checkpoint.

    Raises:
        ValueError: the folder is not a checkpoint of this trainer.
    """
    try:
        text = load_files(source, STATE_FILE)
    except CheckpointError as error:
        raise TrainValueError(
            f"{source} is not a training checkpoint ({error}); "
            "to start from weights alone set model.init_from"
        ) from error
    return TrainerState.from_json(text, source)


def find_checkpoint(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `--resume` names: none for "", the newest valid one for "latest".

    Raises:
        ValueError: there is none.
    """
    if not resume:
        return None
    if resume != "latest":
        path = Path(resume)
        if not path.is_dir():
            raise TrainValueError(f"--resume {resume}: no such folder; name a checkpoint-N folder")
        return path
    found = newest_checkpoint(folder)
    if found is None:
        raise TrainValueError(_NOTHING_TO_RESUME.format(folder))
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest valid checkpoint of a run, or None; a line of the log for each damaged newer one.

    Not collective.
    """
    for path in numbered_checkpoints(folder):
        fault = find_fault(path)
        if fault is None:
            return path
        logger.warning("warning: %s is passed over, an older one is looked for: %s", path, fault)
    return None


def has_part(source: Path, part: str) -> bool:
    """Whether the checkpoint holds tensors of `part`.

    Raises:
        CheckpointError: it does, and they are damaged; that is not the same as having none.
    """
    return any(source.glob(f"{part}[.-]*")) and bool(read_index(source, part))


def check_same_data(state: TrainerState, now: Mapping[str, object], source: Path) -> None:
    """Refuse to resume on data that give sample numbers another meaning.

    Args:
        now: the present values of fields of `TrainerState`.

    Raises:
        ValueError: names the field, both values and the remedy.
    """
    for name, value in now.items():
        if getattr(state, name) != value:
            raise TrainValueError(
                f"{source} was trained with {name}={getattr(state, name)!r}, this run has "
                f"{value!r}; restore the data settings, or set model.init_from to begin anew"
            )


def _restore_former_random_state(source: Path, rank: int) -> None:
    """Set torch's generators from the file that checkpoints had before `random_state_files`."""
    former = source / f"rng-rank-{rank:05d}.safetensors"
    if former.exists():
        states = safetensors.torch.load(load_files(source, former.name))
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

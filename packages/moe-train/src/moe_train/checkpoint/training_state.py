"""What a training checkpoint holds, and how it is written and read under any layout.

`checkpoint-N` is a transformers checkpoint (weights under canonical keys, `config.json`,
`generation_config.json`, tokenizer) and beside it the optimizer moments, fp32 master weights,
`trainer_state.json`, and the random state of every rank. unified-ckpt publishes it with one rename.
"""

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from moe_train.layout import ParameterLayout, StoredTensors, stored_tensors
from moe_train.optim import AdamW
from moe_train.parallel import Parallel
from unified_ckpt import (
    CheckpointError,
    get_last_checkpoint,
    load,
    load_files,
    read_index,
    rotate,
    save,
)
from unified_ckpt.errors import CorruptCheckpointError, DamagedCheckpointWarning

STATE_FILE = "trainer_state.json"

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
            raise ValueError(f"{source / STATE_FILE} is not a trainer state: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointer:
    """Saves and loads this rank's part of the run; `save` and `load` are collective.

    Args:
        folder: where `checkpoint-N` folders go.
        parameters: name -> this rank's parameter or buffer, with `layouts` of the same names.
        files: what a transformers checkpoint holds beside weights; written by rank 0.
        save_total_limit: how many checkpoints to keep; 0 keeps all.
    """

    folder: Path
    parallel: Parallel
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, ParameterLayout]
    optimizer: AdamW
    files: Mapping[str, bytes]
    save_total_limit: int
    timeout_s: float

    def save(self, state: TrainerState) -> Path:
        """Write `checkpoint-{step}`; it appears complete or not at all."""
        target = self.folder / f"checkpoint-{state.step}"
        text = json.dumps(asdict(state), indent=2) + "\n"
        parts = {
            "model": self._stored(self.parameters).shards,
            "optimizer": [shard for moment in self._moments() for shard in moment.shards],
        }
        if self.optimizer.master:
            parts["master_weights"] = self._stored(self.optimizer.master).shards
        save(
            parts,
            checkpoint_id=target,
            files={**self.files, STATE_FILE: text.encode()},
            rank_files={rng_file(self.parallel.rank): random_state(self.parallel.device)},
            timeout_s=self.timeout_s,
        )
        if self.save_total_limit and self.parallel.rank == 0:
            rotate(self.folder, keep=self.save_total_limit)
        return target

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
        if (source / rng_file(self.parallel.rank)).exists():
            restore_random_state(
                load_files(source, rng_file(self.parallel.rank)), self.parallel.device
            )
        return state

    def load_weights(self, source: Path) -> None:
        """Start from the weights of a transformers checkpoint, cast to this run's dtype."""
        read_part(source, "model", [self._stored(self.parameters)], cast=True)
        self.optimizer.master_from_parameters()

    def _stored(self, tensors: Mapping[str, Tensor], suffix: str = "") -> StoredTensors:
        return stored_tensors(self.layouts, tensors, self.parallel.rank, suffix)

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
        raise ValueError(
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
            raise ValueError(f"--resume {resume}: no such folder; name a checkpoint-N folder")
        return path
    found = newest_checkpoint(folder)
    if found is None:
        raise ValueError(
            f"--resume: {folder} holds no complete checkpoint; start without --resume, or name one"
        )
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest valid checkpoint of a run, or None; a line of the log for each damaged newer one.

    Not collective.
    """
    category = DamagedCheckpointWarning
    with warnings.catch_warnings(record=True, action="always", category=category) as caught:
        found = get_last_checkpoint(folder)
    for warning in caught:
        if issubclass(warning.category, category):
            logger.warning("warning: %s", " ".join(str(warning.message).split()))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return found


def has_part(source: Path, part: str) -> bool:
    """Whether the checkpoint holds tensors of `part`.

    Raises:
        CorruptCheckpointError: it does, and they are damaged; that is not the same as having none.
    """
    try:
        return bool(read_index(source, part))
    except CorruptCheckpointError:
        raise
    except CheckpointError:
        return False


def check_same_data(state: TrainerState, now: Callable[[str], object], source: Path) -> None:
    """Refuse to resume on data that give sample numbers another meaning.

    Args:
        now: the present value of a field of `TrainerState`.

    Raises:
        ValueError: names the field, both values and the remedy.
    """
    for name in ("data_fingerprint", "sequence_length", "seed"):
        if getattr(state, name) != now(name):
            raise ValueError(
                f"{source} was trained with {name}={getattr(state, name)!r}, this run has "
                f"{now(name)!r}; restore the data settings, or set model.init_from to begin anew"
            )


def rng_file(rank: int) -> str:
    """The file of a rank's random state."""
    return f"rng-rank-{rank:05d}.safetensors"


def random_state(device: torch.device) -> bytes:
    """The state of torch's generators of this rank."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return safetensors.torch.save(states)


def restore_random_state(data: bytes, device: torch.device) -> None:
    """Set torch's generators from `random_state`."""
    states = safetensors.torch.load(data)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)

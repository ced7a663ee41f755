"""What a training checkpoint holds, and how it is written and read under any layout and dtype.

`checkpoint-N` is a transformers checkpoint (weights under canonical keys, `config.json`,
`generation_config.json`, tokenizer) and beside it the optimizer moments, fp32 master weights,
`trainer_state.json`, the ledger of samples, and the random state of every rank. unified-ckpt
publishes it with one rename.

Invariant: the most exact copy of a weight that a checkpoint has is the one that is loaded: fp32
weights become the master weights of a bf16 run bit for bit, and those the weights of an fp32 run.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_train.checkpoint.background import BackgroundSaves, averaged_part
from moe_train.checkpoint.finding import nothing_to_resume
from moe_train.checkpoint.former_random_state import restore_former_random_state
from moe_train.checkpoint.moments import (
    LOSSY,
    Moments,
    first_updates,
    read_first_updates,
    save_options,
)
from moe_train.checkpoint.node_states import NodeStates
from moe_train.checkpoint.own_files import own_job
from moe_train.checkpoint.parts import has_part, read_part, tensor_keys
from moe_train.checkpoint.rank_tensors import RankTensors
from moe_train.checkpoint.samples import SAMPLES_FILE, read_ledger
from moe_train.checkpoint.trainer_state import TrainerState, may_lack_moments, read_state
from moe_train.config import STATE_FILE
from moe_train.errors import CheckpointNotSavedError, TrainValueError
from moe_train.layout import ParameterLayout, stored_tensors
from moe_train.optim import Optimizer
from unified_ckpt import (
    CheckpointError,
    CheckpointManager,
    ManagerOptions,
    Shard,
    random_state_files,
    restore_random_state,
    save,
)
from unified_ckpt.files.storage import Location
from unified_ckpt.run import SaveError, SavePeerError, encode_metrics, resume_nearest
from unified_ckpt.snapshots.average import EMA_PART

_UNREADABLE = (
    "{} cannot be gone on from: {}; if a file is damaged, restore it or --resume an older "
    "checkpoint; if the model differs, use the checkpoint's own"
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Checkpointer:
    """Saves and loads this rank's part of the run. Close it when the run ends.

    The folder is locked for this job from the first collective call until `close`.

    Args:
        folder: where checkpoints `checkpoint-N` go, a directory or a location in a store.
        rank: of this process in the job.
        parameters: name -> this rank's parameter or buffer, with `layouts` of the same names.
        layouts_of_updates: how moments and master weights lie.
        files: what a transformers checkpoint holds beside weights; written by rank 0.
        options: when to save, and how many checkpoints to keep.
        nodes: states on the nodes between checkpoints; None for none.
        background: saves beside training; None where training waits for them.
        moments: how AdamW's are stored, here and on the nodes.
    """

    folder: Path | Location
    rank: int
    parameters: Mapping[str, Tensor]
    layouts: Mapping[str, ParameterLayout]
    layouts_of_updates: Mapping[str, ParameterLayout]
    optimizer: Optimizer
    files: Mapping[str, bytes]
    options: ManagerOptions
    nodes: NodeStates | None = None
    background: BackgroundSaves | None = None
    moments: Moments = "exact"
    _opened: CheckpointManager | None = field(default=None, init=False)
    _placed: RankTensors | None = field(default=None, init=False)

    @property
    def manager(self) -> CheckpointManager:
        """The run's folder. Collective when it is first asked for."""
        if self._opened is None:
            self._opened = CheckpointManager(self.folder, self.options)
        return self._opened

    def close(self) -> None:
        """Release the folder, and that of the node."""
        if self._opened is not None:
            self._opened.close()
        if self.nodes is not None:
            self.nodes.close()

    def take_over(self, other: "Checkpointer", average: Mapping[str, Tensor]) -> None:
        """Save and load from now on what `other` would, which must not be used any more.

        Args:
            average: the moving average where one is kept, as `other` lays it out.

        Raises:
            SaveError: this rank has no memory for saves beside training.
        """
        self.parameters, self.layouts, self._placed = other.parameters, other.layouts, None
        self.layouts_of_updates = other.layouts_of_updates
        self.optimizer, self.files = other.optimizer, other.files
        if self.background is not None and other.background is not None:
            shards = stored_tensors(self.layouts_of_average, average, self.rank).shards
            other.background.take_over(self.background, self.parts(), shards)
            self.background = other.background

    def room_for_average(self) -> dict[str, Tensor]:
        """Memory for the moving average of this rank's weights, fp32 where they are floating."""
        part = None if self.background is None else self.background.averaged
        if part is None:
            return {}
        averaged = self.parameters if part == "model" else self.optimizer.master
        return {
            name: torch.empty_like(t, dtype=torch.float32 if t.is_floating_point() else t.dtype)
            for name, t in averaged.items()
        }

    def read_average(self) -> dict[str, Tensor]:
        """The moving average as it is after all saves so far, name -> tensor; none: empty."""
        average = self.room_for_average()
        if self.background is not None and average:
            stored = stored_tensors(self.layouts_of_average, average, self.rank)
            self.background.read_average(stored.shards)
            stored.write_back()
        return average

    @property
    def layouts_of_average(self) -> Mapping[str, ParameterLayout]:
        """How the moving average lies, where one is kept."""
        part = None if self.background is None else self.background.averaged
        return self.layouts if part == "model" else self.layouts_of_updates

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`. Collective."""
        return self.manager.decide(step).save

    def save(
        self,
        state: TrainerState,
        *,
        validation_loss: float | None = None,
        keep_older: bool = False,
    ) -> Path | Location:
        """Write `checkpoint-{step}`, complete or not at all; then remove old ones. Collective.

        Args:
            validation_loss: of this state, by which the best checkpoint is known.
            keep_older: remove none.

        Raises:
            CheckpointNotSavedError: some rank could not write; says in one line why. On every rank.
            SavePeerError: a rank is lost.
        """
        target = self.manager.path(state.step)
        try:
            save(
                self.parts(),
                checkpoint_id=self.manager.begin(state.step),
                files=self.files_of(state, validation_loss),
                rank_files=random_state_files(self.rank),
                options=save_options(self.moments),
                timeout_s=self.options.timeout_s,
            )
        except SavePeerError:
            raise
        except SaveError as error:
            raise CheckpointNotSavedError(self.failure_line(target.name, str(error))) from error
        if not keep_older:
            self.remove_older(state.step)
        return self.folder / target.name

    def files_of(self, state: TrainerState, validation_loss: float | None) -> dict[str, bytes]:
        """What a checkpoint of this state holds beside tensors."""
        files = {**self.files, **self._state_files(state)}
        if validation_loss is not None and self.options.best_metric is not None:
            metrics = {self.options.best_metric: validation_loss}
            files["metrics.json"] = encode_metrics(state.step, metrics)
        return files

    def failure_line(self, name: str, why: str) -> str:
        """The line that says why a checkpoint was not saved."""
        free = ""
        if isinstance(self.folder, Path):
            free = f" ({shutil.disk_usage(self.folder).free} bytes are free there)"
        return f"{name} was not saved in {self.folder}{free}: {why.partition('): ')[2] or why}"

    def save_on_nodes(self, nodes: NodeStates, state: TrainerState) -> None:
        """Save the state on the nodes, with its copies on others. Collective.

        Raises:
            CheckpointNotSavedError: some node could not; the state before is there. On every rank.
            SavePeerError: a rank is lost.
        """
        try:
            nodes.tier.save(
                self.parts(),
                state.step,
                files={**nodes.files, **self._state_files(state)},
                rank_files=random_state_files(self.rank),
                options=save_options(self.moments),
            )
        except SavePeerError:
            raise
        except SaveError as error:
            raise CheckpointNotSavedError(
                f"the state of step {state.step} was not saved on the nodes: {error}"
            ) from error

    def parts(self) -> dict[str, list[Shard]]:
        """What a checkpoint holds of this rank's tensors."""
        parts = {"model": self.part("model"), "optimizer": first_updates(self.optimizer.late)}
        for moment, tensors in self.optimizer.moments().items():
            parts["optimizer"] += self._mine.updates(tensors, f"/{moment}").shards
        if self.optimizer.master:
            parts["master_weights"] = self.part("master_weights")
        return parts

    def part(self, part: str) -> list[Shard]:
        """The weights, as they are or their fp32 copies."""
        if part == "model":
            return self._mine.weights(self.parameters).shards
        return self._mine.updates(self.optimizer.master).shards

    def remove_older(self, step: int) -> None:
        """Keep the newest checkpoints; the first rank does it, and failing is one line."""
        try:
            self.manager.committed(step)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "warning: checkpoint-%d is saved, but no older one left: %s", step, error
            )

    def resume(self) -> TrainerState:
        """Load the newest complete checkpoint, the same one on all ranks. Collective.

        Raises:
            ValueError: there is none, or it does not fit this run.
        """
        try:
            found = self._resume_nearest(self.nodes) if self.nodes else self._resume_stored()
        except CheckpointError as error:
            raise TrainValueError(_UNREADABLE.format(self.folder, error)) from error
        if found is None:
            raise nothing_to_resume(self.folder)
        return found[1]

    def _resume_stored(self) -> tuple[Path | Location, TrainerState] | None:
        return self.manager.resume(self._load)

    def _resume_nearest(self, nodes: NodeStates) -> tuple[Path | Location, TrainerState] | None:
        """Go on from the nodes if they have a state as new as storage; say where from."""

        def load_one(source: Path | Location) -> TrainerState:
            if isinstance(source, Path) and source.is_relative_to(nodes.options.path):
                nodes.check_layout(source)
            return self._load(source)

        found = resume_nearest(self.manager, nodes.tier, load_one)
        if found is not None and self.rank == 0:
            logger.info("step %d is loaded from %s", found[1].step, found[0])
        return found

    def load(self, source: Path | Location) -> TrainerState:
        """Restore weights, optimizer, and this rank's random state if the checkpoint has it.

        What is stored in another dtype is converted, from the master weights where there are any.
        Trainer state, ledger, random state and tensors are of one checkpoint, on all ranks.
        Collective.

        Raises:
            ValueError: a file is damaged, or a key or a shape differs, or the checkpoint was
                replaced while it was read; the message names it. On every rank.
        """
        try:
            return self.manager.load_named(source, self._load)
        except CheckpointError as error:
            raise TrainValueError(_UNREADABLE.format(source, error)) from error

    def _load(self, source: Path | Location) -> TrainerState:
        self._load_weights(source)
        state = replace(read_state(source), ledger=read_ledger(source))
        if state.moments != "exact" and self.rank == 0:
            logger.info(LOSSY, source)
        updates = state.step - state.skipped_steps
        self.optimizer.set_step(updates, self._load_moments(source, updates))
        if not restore_random_state(source, self.rank):
            restore_former_random_state(source, self.rank)
        self._load_average(source, state.step)
        return state

    def _load_average(self, source: Path | Location, step: int) -> None:
        """Go on with the moving average, or say that none does."""
        has_one, background = has_part(source, EMA_PART), self.background
        kept = None if background is None else background.averaged
        own = own_job(source) if has_one and kept else None
        stored = kept if own is None else averaged_part(own)
        if background is not None and has_one and kept is not None and kept == stored:
            background.load_average(self.parts(), source)
        elif self.rank == 0 and has_one and kept:
            text = "warning: the moving average in %s is one of its %s, and this job would average "
            text += "its %s, since train.dtype is another one; the average begins with step %d"
            logger.warning(text, source, stored, kept, step + 1)
        elif self.rank == 0 and has_one:
            logger.warning(
                "warning: %s holds a moving average, which is not continued: "
                "checkpoint.ema_decay is not set",
                source,
            )
        elif self.rank == 0 and kept:
            text = "warning: %s holds no moving average, so it begins with step %d"
            logger.warning(text, source, step + 1)

    def load_weights(self, source: Path) -> None:
        """Start from the weights of a transformers checkpoint, converted to this run's dtype.

        Rows of vocabulary that it does not have become the mean of those that it has. Collective.

        Raises:
            ValueError: a file is damaged, it has more rows than the model, or a tensor does not
                fit; the message names it.
        """
        try:
            self._mine.load_first(source, self.optimizer.master)
        except CheckpointError as error:
            raise TrainValueError(f"model.init_from={source}: {error}") from error
        if self.optimizer.master:
            self.optimizer.show()

    def _load_weights(self, source: Path | Location) -> None:
        """Fill the parameters, and what is in fp32 with the most exact copy there is."""
        read_part(source, "model", [self._mine.weights(self.parameters)], cast=True)
        masters = self.optimizer.master
        fp32 = {n: t for n, t in self.parameters.items() if t.dtype == torch.float32}
        exact = self._held(masters or fp32, source, "master_weights")
        if exact:
            stored = self._mine.updates(exact) if masters else self._mine.weights(exact)
            read_part(source, "master_weights", [stored], cast=True)
        others = {name: tensor for name, tensor in masters.items() if name not in exact}
        if others:
            read_part(source, "model", [self._mine.updates(others)], cast=True)

    def _load_moments(self, source: Path | Location, updates: int) -> dict[str, int]:
        """Fill the moments; those of parameters that were frozen before, or that another
        algorithm has updated, start at zero.

        Returns:
            Name -> updates that the run had made before the parameter's first one, where not 0.
        """
        late: dict[str, int] = {}
        may_lack = may_lack_moments(source)
        for moment, tensors in self.optimizer.moments().items():
            held = dict(tensors)
            if may_lack or not self.optimizer.is_counted(moment):
                held = self._held(tensors, source, "optimizer", f"/{moment}")
            if held:
                read_part(source, "optimizer", [self._mine.updates(held, f"/{moment}")], cast=True)
            if self.optimizer.is_counted(moment):
                late |= dict.fromkeys(tensors.keys() - held.keys(), updates)
        return read_first_updates(source, self.optimizer.updated()) | late

    def _held(
        self, tensors: Mapping[str, Tensor], source: Path | Location, part: str, suffix: str = ""
    ) -> dict[str, Tensor]:
        """Those of the tensors that the checkpoint has in this part."""
        keys = tensor_keys(source, part) if has_part(source, part) else ()
        views = {name: self.layouts[name].form.views for name in tensors}
        return {n: t for n, t in tensors.items() if any(v.key + suffix in keys for v in views[n])}

    @property
    def _mine(self) -> RankTensors:
        if self._placed is None:
            self._placed = RankTensors(
                rank=self.rank,
                parameters=self.parameters,
                layouts=self.layouts,
                layouts_of_updates=self.layouts_of_updates,
            )
        return self._placed

    def _state_files(self, state: TrainerState) -> dict[str, bytes]:
        state = replace(state, moments=self.moments)
        return {STATE_FILE: state.to_json(), SAMPLES_FILE: state.ledger.to_json()}

"""Checkpoints of a run that are written beside training: begun together, ended one by one.

beside = SavesBeside(checkpointer, background)
beside.open()
beside.begin(state, loss=result.loss)
for outcome in beside.outcomes():        # of the saves that have ended on this rank
    print(outcome.place, outcome.failure or "committed")
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moe_train.checkpoint import BackgroundSaves, Checkpointer, TrainerState
from moe_train.errors import CheckpointNotSavedError
from unified_ckpt import random_state_files
from unified_ckpt.files.storage import Location
from unified_ckpt.run import SaveError


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """What became of the checkpoint of a step; `failure` is empty when it is committed.

    Without `place` it was an update of the moving average alone.
    """

    step: int
    place: Path | Location | None
    failure: str


@dataclass(frozen=True, slots=True)
class SavesBeside:
    """What a checkpointer saves through the savers of `background`."""

    checkpointer: Checkpointer
    background: BackgroundSaves

    def open(self) -> None:
        """Start the savers, with memory for the state. Collective.

        Raises:
            CheckpointNotSavedError: some rank could not.
        """
        try:
            self.background.open(self.checkpointer.parts(), self.checkpointer.files)
        except SaveError as error:
            raise CheckpointNotSavedError(
                "checkpoint.save_mode needs a process and memory beside training, and one of them "
                f'is not to be had: {error}; set it to "sync" to do without'
            ) from error

    def begin(
        self, state: TrainerState, *, loss: float, validation_loss: float | None = None
    ) -> None:
        """Begin to write `checkpoint-{step}`. Collective; `outcomes` tells the end.

        Args:
            loss: of the step; NaN leaves it out of the moving average.
            validation_loss: of this state, by which the best checkpoint is known.

        Raises:
            CheckpointNotSavedError: a store does not take it. On every rank.
        """
        own = self.checkpointer
        try:
            place = own.manager.begin(state.step)
        except SaveError as error:
            name = own.manager.path(state.step).name
            raise CheckpointNotSavedError(own.failure_line(name, str(error))) from error
        self.background.begin(
            own.parts(),
            place,
            step=state.step,
            files=own.files_of(state, validation_loss),
            rank_files=random_state_files(own.rank),
            loss=loss,
        )

    def update_average(self, step: int, loss: float) -> None:
        """Take the weights after `step` into the moving average, if one is kept; every rank does.

        Args:
            loss: of the step; NaN leaves it out.
        """
        part = self.background.averaged
        if part is not None:
            parts = {part: self.checkpointer.part(part)}
            self.background.begin(parts, None, step=step, loss=loss)

    def outcomes(
        self, *, wait: bool = False, keep_older: bool = False, copies_next: bool = False
    ) -> list[SaveOutcome]:
        """What became of the saves that have ended; not collective.

        A thread of the first rank removes older checkpoints behind those that are committed.

        Args:
            wait: for all that began, and for removals.
            keep_older: remove none.
            copies_next: the next call does; so far none is removed, which would slow a copy down.
        """
        own, told = self.checkpointer, []
        for step, place, failure in self.background.outcomes(wait=wait):
            if place is None:
                if failure:
                    failure = f"the moving average lacks step {step}: {failure}"
                    told.append(SaveOutcome(step, None, failure))
                continue
            line = own.failure_line(place.name, failure) if failure else ""
            told.append(SaveOutcome(step, own.folder / place.name, line))
            if not failure and not keep_older:
                self.background.remove(partial(own.remove_older, step))
        if wait:
            self.background.finish_removals()
        elif not copies_next:
            self.background.start_removals()
        return told

"""When a run saves, and what it does when a checkpoint cannot be written.

Invariant: every rank takes the same decision. A failed save is one line; older checkpoints stay,
training goes on, and what is still unsaved at the end is an error. What became of a save beside
training is known on each rank in its own time (`look`), so that until all have waited for it, only
lines, `saved` and a request to stop depend on it.

    saver = Saver(checkpointer=checkpointer, config=config, is_first=rank == 0)
    result = runner.train(batches, lr=lr, save=saver.is_late())
    if saver.is_due(step, result) or last:
        saver.save(state)
    saver.look()
    saver.check()                           # CheckpointNotSavedError: the last state is not saved
"""

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from moe_train.checkpoint import Checkpointer, TrainerState
from moe_train.config import Config
from moe_train.errors import CheckpointNotSavedError
from moe_train.training.beside import SavesBeside
from moe_train.training.step import StepResult
from unified_ckpt.files.storage import Location
from unified_ckpt.run import SaveError

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the checkpoints of one run; all but `is_late` and `look` is collective or pure.

    Attributes:
        first_step: finished steps when this run began or went on.
        best_validation_loss: the lowest of the run so far; None: none yet.
        saved: the last checkpoint written, if any.
        failure: why the last save failed; empty when it did not.
        longest_s: what the longest save has taken, with what was written beside training.
        stop_reason: the failed save that ends the run (`checkpoint.stop_on_save_error`), if any.
    """

    checkpointer: Checkpointer
    config: Config
    is_first: bool
    first_step: int = 0
    best_validation_loss: float | None = None
    saved: Path | Location | None = None
    failure: str = ""
    longest_s: float = 0.0
    stop_reason: str = ""
    _stall_s: float = 0.0
    _loss: float = math.nan  # of the last step, if it counts in the moving average
    _tried_s: float = field(default_factory=time.monotonic)
    _validated: tuple[int, float] | None = None  # at which step, and its loss
    _best_step: int = -1
    _began_s: dict[int, float] = field(default_factory=dict)  # saves beside training, by step
    _is_in_storage: bool = False  # a save there began in this run, on every rank

    def open(self) -> None:
        """Start what saves beside training, with memory for the state. Collective.

        Raises:
            CheckpointNotSavedError: some rank could not.
        """
        if self.beside is not None:
            self.beside.open()

    def is_late(self) -> bool:
        """Whether the clock asks for a save; only that of rank 0 does."""
        minutes = self.config.checkpoint.interval_minutes
        return self.is_first and time.monotonic() - self._tried_s >= 60 * minutes

    def is_due(self, step: int, result: StepResult) -> bool:
        """Whether to save after this step."""
        every = self.config.checkpoint.ema_interval_steps
        self._loss = result.loss if result.applied and step % every == 0 else math.nan
        is_best = step == self._best_step and self.config.checkpoint.keep_best
        return self.checkpointer.is_due(step) or result.save_requested or is_best

    def note_validation(self, step: int, loss: float) -> None:
        """Note the loss that a validation after `step` has found, the same on every rank."""
        best = self.best_validation_loss
        if math.isnan(loss):  # a mean over no token, or of a model that has diverged: never best
            return
        self._validated = (step, loss)
        if best is None or loss < best:
            self._best_step, self.best_validation_loss = step, loss

    def save(self, state: TrainerState, *, at_end: bool = False) -> None:
        """Write a checkpoint; when that fails, say so and keep the reason.

        Args:
            at_end: no step follows, so that `check` is what tells of a failure.

        Raises:
            CheckpointNotSavedError: it failed, and `checkpoint.stop_on_save_error` is set.
        """
        self._tried_s, self._is_in_storage = time.monotonic(), True
        step, loss = self._validated or (-1, None)
        loss = loss if step == state.step else None
        try:
            if self.beside is None:
                self.saved = self.checkpointer.save(state, validation_loss=loss)
                self.failure = ""
            else:
                # A failure that nobody has seen would fail this save as well.
                self._note_outcomes(copies_next=True)
                self._began_s[state.step] = self._tried_s
                self.beside.begin(state, loss=self._loss, validation_loss=loss)
                self.look(wait=at_end)
        except CheckpointNotSavedError as error:
            self._note_failure(str(error), told=not at_end and not self._stops)
            if self.stop_reason:
                raise
        taken_s = time.monotonic() - self._tried_s
        self.longest_s = max(self.longest_s, taken_s)
        self._stall_s += taken_s

    @property
    def beside(self) -> SavesBeside | None:
        """The saves beside training; None where training waits for them."""
        background = self.checkpointer.background
        return None if background is None else SavesBeside(self.checkpointer, background)

    def update_average(self, step: int) -> None:
        """Take the weights after a step without a checkpoint into the moving average, if due."""
        if self.beside is not None and not math.isnan(self._loss):
            started = time.monotonic()
            self.beside.update_average(step, self._loss)
            self._stall_s += time.monotonic() - started

    @property
    def _stops(self) -> bool:
        return self.config.checkpoint.stop_on_save_error

    def take_stall(self) -> float:
        """Seconds that training stood still for saves since the last call."""
        stall_s, self._stall_s = self._stall_s, 0.0
        background = self.checkpointer.background
        return stall_s + (0.0 if background is None else background.take_stall())

    def look(self, *, wait: bool = False) -> None:
        """Note what became of the saves beside training; nothing where there are none.

        Args:
            wait: for all that began; then every rank knows.

        Raises:
            CheckpointNotSavedError: after the wait, where there is a `stop_reason`.
        """
        self._note_outcomes(wait=wait)
        if wait and self.stop_reason:
            raise CheckpointNotSavedError(
                f"{self.stop_reason}; the last checkpoint is {self.saved}"
            )

    def _note_outcomes(
        self, *, wait: bool = False, keep_older: bool = False, copies_next: bool = False
    ) -> None:
        if self.beside is None:
            return
        for outcome in self.beside.outcomes(
            wait=wait, keep_older=keep_older, copies_next=copies_next
        ):
            now_s = time.monotonic()
            taken_s = now_s - self._began_s.pop(outcome.step, now_s)
            self.longest_s = max(self.longest_s, taken_s)
            if outcome.failure:
                self._note_failure(outcome.failure, told=not wait, kept=outcome.place is None)
            elif outcome.place is not None:
                self.saved, self.failure = outcome.place, ""

    def _note_failure(self, failure: str, *, told: bool, kept: bool = False) -> None:
        """Note why a save failed, or with `kept` only that the moving average lacks a step."""
        if not kept:
            self.failure = failure
            if self._stops and not self.stop_reason:
                self.stop_reason = failure
        then = "training goes on" if kept else "training goes on, the next save tries again"
        if self.stop_reason:
            then = "the run ends after this step"
        if self.is_first and (told or kept):
            logger.warning("warning: %s; %s", failure, then)

    def is_due_on_nodes(self, step: int) -> bool:
        """Whether to save on the nodes after a step at which no checkpoint is due."""
        nodes = self.checkpointer.nodes
        return nodes is not None and step % nodes.tier_steps == 0

    def save_on_nodes(self, state: TrainerState) -> None:
        """Save the state on the nodes; in storage as well, if that has none of this run yet.

        So a resume always finds a checkpoint that says what the run was. When it fails, that is one
        line, and the state before stays.
        """
        if not self._is_in_storage and self.first_step == 0:
            self.save(state)
        nodes = self.checkpointer.nodes
        if nodes is None:
            return
        try:
            self.checkpointer.save_on_nodes(nodes, state)
        except CheckpointNotSavedError as error:
            if self.is_first:
                logger.warning("warning: %s; training goes on", error)

    def finish(self) -> None:
        """Free the states on the nodes, when the last one is saved in storage; end the savers."""
        nodes, background = self.checkpointer.nodes, self.checkpointer.background
        try:
            if background is not None:
                background.close()
        except SaveError as error:  # a saver died when everything was written
            logger.warning("warning: at the end of the run: %s", error)
        if nodes is not None and not self.failure:
            nodes.tier.clear()

    def save_before_error(self, state: TrainerState) -> str:
        """Save the state before a step that ends the run, and remove no older checkpoint.

        Returns:
            What became of it, for the message.
        """
        if state.step == self.first_step:
            return f"no step was finished since step {state.step}, so nothing is saved"
        try:
            self._note_outcomes(wait=True, keep_older=True)
            if self.saved is not None and self.saved.name == f"checkpoint-{state.step}":
                return f"the state before it is {self.saved}"
            if self.beside is None:
                self.saved = self.checkpointer.save(state, keep_older=True)
            else:
                self._save_beside(self.beside, state)
            return f"the state before it is saved as {self.saved}"
        except CheckpointNotSavedError as error:
            return f"the state before it is lost: {error}"

    def _save_beside(self, beside: SavesBeside, state: TrainerState) -> None:
        """Save through the savers, which keep the moving average, and wait; remove none."""
        self.failure = ""
        beside.begin(state, loss=math.nan)
        self._note_outcomes(wait=True, keep_older=True)
        if self.failure:
            raise CheckpointNotSavedError(self.failure)

    def check(self) -> None:
        """Raise what the last save failed with, if it failed.

        Raises:
            CheckpointNotSavedError: the end of the run is not saved.
        """
        if self.failure:
            last = self.saved or "none of this run"
            raise CheckpointNotSavedError(
                f"{self.failure}; the last checkpoint is {last}: free space and go on with --resume"
            )

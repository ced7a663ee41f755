"""A guard against steps that would spoil the weights: losses far above the last ones.

Invariant: what it decides depends on losses alone, which are equal on every rank, and its memory is
saved, so that a resumed run decides as the whole one.

    guard = SpikeGuard.of(config.train, recent_losses=(), skips_in_row=0)
    result = runner.train(batches, lr=lr, max_loss=guard.max_loss)
    guard.note(result, step)                # LossSpikeError: the run has to end
"""

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe_train.config import Config
from moe_train.training.step import BadStepError, StepResult

logger = logging.getLogger(__name__)


class LossSpikeError(BadStepError):
    """The loss is far above the last ones, and the job says to stop then."""


@dataclass(slots=True, kw_only=True)
class SpikeGuard:
    """Says which loss is too high, and counts what was left out.

    Attributes:
        threshold: most of a loss, as a multiple of the median; None for no guard.
        window: losses of which the median is taken.
        max_skips: updates in a row that may be left out; 0 stops at the first.
        losses: those of the last updates, oldest first; none without a guard.
        skips_in_row: updates that were left out since the last one that was not.
        skipped: all that were left out.
    """

    threshold: float | None
    window: int
    max_skips: int
    losses: list[float]
    skips_in_row: int = 0
    skipped: int = 0

    @classmethod
    def of(
        cls, config: Config, losses: Sequence[float] = (), skips_in_row: int = 0, skipped: int = 0
    ) -> "SpikeGuard":
        """The guard of a job that goes on after these losses."""
        train = config.train
        return cls(
            threshold=train.loss_spike_threshold,
            window=train.loss_spike_window,
            max_skips=train.max_skipped_steps if train.on_loss_spike == "skip" else 0,
            losses=list(losses)[-train.loss_spike_window :],
            skips_in_row=skips_in_row,
            skipped=skipped,
        )

    @property
    def max_loss(self) -> float:
        """The loss above which the next update is left out; infinite until the window is full."""
        if self.threshold is None or len(self.losses) < self.window:
            return math.inf
        return self.threshold * statistics.median(self.losses)

    def note(self, result: StepResult, step: int) -> None:
        """Take in the result of step number `step`; a warning where its update was left out.

        Raises:
            LossSpikeError: the run has to end before this step.
        """
        if result.applied:
            self.skips_in_row = 0
            if self.threshold is not None:
                self.losses = [*self.losses, result.loss][-self.window :]
            return
        if result.num_tokens == 0:
            self.skipped += 1
            logger.warning(
                "warning: no token of step %d is to be predicted; its update is left out", step
            )
            return
        said = (
            f"step {step}: loss={result.loss:.6g} is above train.loss_spike_threshold="
            f"{self.threshold:g} times the median of the last {self.window} losses "
            f"({statistics.median(self.losses):.6g})"
        )
        if self.skips_in_row >= self.max_skips:
            after = f" after {self.skips_in_row} updates left out" if self.skips_in_row else ""
            raise LossSpikeError(f"{said}{after}")
        self.skips_in_row += 1
        self.skipped += 1
        logger.warning(
            "%s; its update is left out, the %d. in a row of at most %d",
            said,
            self.skips_in_row,
            self.max_skips,
        )

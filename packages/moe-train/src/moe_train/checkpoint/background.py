"""Checkpoints that a process beside the trainer writes, and the moving average that it keeps.

The trainer only copies its state, at once (`async`) or in pieces between the microbatches of the
next step (`zero_cost`); unified-ckpt's savers do the rest. Whether a checkpoint is committed is
known later: `outcomes` tells, on each rank in its own time, so nothing that ranks must do together
may depend on it before `outcomes(wait=True)`.

    background = BackgroundSaves.of(config)      # None with checkpoint.save_mode = "sync"
    background.begin(parts, place, files=files, rank_files=rank_files, loss=loss)
    ...                                          # forward and backward of the next step
    background.finish_copy()                     # before the weights change
    for step, place, failure in background.outcomes(): ...
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_train.checkpoint.moments import Moments, save_options
from moe_train.config import Config
from unified_ckpt import AsyncSaver, AsyncSaverConfig, Shard, ZeroCostSaver, async_save
from unified_ckpt.files.storage import Location
from unified_ckpt.run import SaveError
from unified_ckpt.snapshots.average import EmaConfig

Parts = Mapping[str, Sequence[Shard]]
Place = Path | Location


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save under way: its future, or why it could not begin."""

    step: int
    place: Place | None
    future: Future[Any] | str

    @property
    def is_over(self) -> bool:
        return isinstance(self.future, str) or self.future.done()

    def failure(self, timeout_s: float) -> str:
        if isinstance(self.future, str):
            return self.future
        try:
            error = self.future.exception(timeout_s)
        except TimeoutError:
            return f"it did not end within {timeout_s:g} s"
        return "" if error is None else str(error)


def averaged_part(config: Config) -> str:
    """The part of a checkpoint of which the job's moving average is kept, if it keeps one."""
    return "master_weights" if config.train.master_weights else "model"


@dataclass(slots=True, kw_only=True)
class BackgroundSaves:
    """This rank's saver process and the saves under way. Close it when the run ends.

    Args:
        settings: of the saver, with the moving average if one is kept.
        zero_cost: copy in pieces between the microbatches; False copies at once.
        num_microbatches: of a step.
        moments: how AdamW's are stored; the saver process changes their form.

    Attributes:
        stall_s: what the trainer's thread has spent in copies since `take_stall`, besides `begin`.
    """

    settings: AsyncSaverConfig
    zero_cost: bool
    num_microbatches: int
    moments: Moments = "exact"
    stall_s: float = 0.0
    _opened: AsyncSaver | None = field(default=None, init=False)
    _chunks: ZeroCostSaver | None = field(default=None, init=False)
    _begun: list[_Begun] = field(default_factory=list, init=False)
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)
    _to_remove: list[Callable[[], None]] = field(default_factory=list, init=False)
    _removals: list[Future[None]] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, config: Config) -> "BackgroundSaves | None":
        """What the job asks for; None where its saves are part of training."""
        asked = config.checkpoint
        if asked.save_mode == "sync":
            return None
        ema = None
        if asked.ema_decay is not None:
            ema = EmaConfig(decay=asked.ema_decay, source=averaged_part(config))
        return cls(
            settings=AsyncSaverConfig(timeout_s=max(config.parallel.timeout_s, 600.0), ema=ema),
            zero_cost=asked.save_mode == "zero_cost",
            num_microbatches=config.train.gradient_accumulation_steps,
            moments=asked.moments,
        )

    @property
    def averaged(self) -> str | None:
        """The part of which a moving average is kept; None for none."""
        return None if self.settings.ema is None else self.settings.ema.source

    def open(self, parts: Parts, files: Mapping[str, bytes] | None = None) -> None:
        """Start the saver process and make room for such a state. Collective the first time.

        Args:
            parts, files: as of later saves; without files there is room for small ones.

        Raises:
            SaveError: some rank could not start it, or has not enough memory.
        """
        self._saver().prepare(parts, files=files)
        if self._chunks is not None:
            self._chunks.prepare(parts, files=files)

    def load_average(self, parts: Parts, source: Place) -> None:
        """Go on with the moving average of a checkpoint, saved under any layout.

        Raises:
            CheckpointError: it is damaged or does not fit.
        """
        self.open(parts)
        self._saver().load_ema(source)

    def read_average(self, shards: Sequence[Shard]) -> None:
        """Copy the moving average, with all snapshots so far in it, into shards of its boxes.

        Raises:
            SaveError: the saver process does not come to an end with what it has.
        """
        self.finish_copy()
        average = {(each.key, each.box): each.tensor for each in self._saver().average()}
        for shard in shards:
            shard.tensor.copy_(average[shard.key, shard.box])

    def take_over(self, other: "BackgroundSaves", parts: Parts, average: Sequence[Shard]) -> None:
        """Go on with the saver and the saves of `other`, for a state in another layout.

        What it writes goes on; `other` must not be used any more.

        Args:
            parts: the state.
            average: what `read_average` of all ranks has given, in the boxes of the state.

        Raises:
            SaveError: there is not enough memory for the state.
        """
        other.finish_copy()
        self.stall_s, self._begun, self._removals = other.stall_s, other._begun, other._removals
        self._to_remove = other._to_remove
        self._opened, self._chunks, self._thread = other._opened, other._chunks, other._thread
        if self._opened is not None:
            if self.averaged is not None:
                self._opened.move_average(parts, average)
            self.open(parts)

    def begin(
        self,
        parts: Parts,
        place: Place | None,
        *,
        step: int,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        loss: float = math.nan,
    ) -> None:
        """Begin a save, or with `place` None an update of the average; every rank does.

        With `zero_cost` the tensors must not change until `finish_copy`.

        Args:
            loss: of this step, the same on all ranks; NaN leaves the step out of the average.
        """
        given: dict[str, Any] = {
            "files": files,
            "rank_files": rank_files,
            "options": save_options(self.moments),
        }
        if self.averaged is not None:
            given["loss"] = loss
        future: Future[Any] | str
        try:
            saver = self._saver()
            if self._chunks is not None:
                future = self._chunks.begin_save(parts, checkpoint_id=place, **given)
            elif place is not None:
                response = async_save(parts, checkpoint_id=place, saver=saver, **given)
                future = response.upload_completion
            else:
                return
        except SaveError as error:  # the savers of the other ranks know
            future = str(error)
        self._begun.append(_Begun(step, place, future))

    def copy_piece(self) -> None:
        """Let one more piece be copied; once a microbatch."""
        if self._chunks is not None:
            with self._stalling():
                self._chunks.offload_chunk()

    def finish_copy(self) -> None:
        """End the copy under way; afterwards the weights may change.

        One that fails is told by `outcomes`, as whatever else became of that save.
        """
        if self._chunks is not None:
            with self._stalling(), contextlib.suppress(SaveError):
                self._chunks.finish()

    def outcomes(self, *, wait: bool = False) -> Iterator[tuple[int, Place | None, str]]:
        """Step, place and failure of the saves that have ended, in their order; with `wait` of all.

        Without a place it was an update of the average alone; without a failure it is done.
        """
        if wait:
            self.finish_copy()
        while self._begun and (wait or self._begun[0].is_over):
            first = self._begun.pop(0)
            yield first.step, first.place, first.failure(2 * self.settings.timeout_s)

    def remove(self, work: Callable[[], None]) -> None:
        """Note what deletes files, which takes as long as a copy; see `start_removals`."""
        self._to_remove.append(work)

    def start_removals(self) -> None:
        """Let a thread delete what was noted, one after another; not while a copy is under way."""
        while self._removals and self._removals[0].done():
            self._removals.pop(0).result()
        while self._to_remove:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="moe-train-removals")
            self._removals.append(self._thread.submit(self._to_remove.pop(0)))

    def finish_removals(self) -> None:
        """Delete what was noted, and wait for the end of it."""
        self.start_removals()
        while self._removals:
            self._removals.pop(0).result()

    def take_stall(self) -> float:
        """Seconds of `stall_s` since the last call."""
        stall_s, self.stall_s = self.stall_s, 0.0
        return stall_s

    def close(self) -> None:
        """End the saver process after what it writes.

        Raises:
            SaveError: it had died.
        """
        self.finish_removals()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._opened is not None:
            with contextlib.closing(self._opened):
                if self._chunks is not None:
                    self._chunks.close()

    def _saver(self) -> AsyncSaver:
        if self._opened is None:
            self._opened = AsyncSaver(config=self.settings)
            if self.zero_cost:
                self._chunks = ZeroCostSaver(
                    self._opened,
                    num_microbatches=self.num_microbatches,
                    timeout_s=self.settings.timeout_s,
                )
        return self._opened

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stall_s += time.perf_counter() - started

"""The checkpoints of one training run: when to save, what to keep, where to resume.

A small class over pure functions (`due_by_steps`, `best_of`, `rotate`, `valid_checkpoints`). Every
decision that could differ between ranks (a signal that reached one of them, a clock) is agreed over
the group, so that all ranks save at the same step or none does.

    with CheckpointManager("run", ManagerOptions(save_steps=500, save_total_limit=3)) as manager:
        for step in range(1, num_steps + 1):
            train_step()
            decision = manager.decide(step)
            if decision.save:
                manager.save(state_dict, step, metrics={"loss": loss})
            if decision.stop:
                break
"""

import operator
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import torch.distributed as dist

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    DamagedCheckpointWarning,
    LoadError,
    ReplacedCheckpointError,
    SaveArgumentError,
    SaveError,
    check_type,
)
from unified_ckpt.files import make_folders
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.folders import (
    Depth,
    check_depth,
    check_no_link,
    checked_checkpoints,
    is_complete,
    numbered_checkpoints,
    rotate,
)
from unified_ckpt.folders.in_store import clean_stored
from unified_ckpt.loading import read_together
from unified_ckpt.options import SaveOptions
from unified_ckpt.run.hold import FolderHold, hold_folder
from unified_ckpt.run.manager_options import ManagerOptions
from unified_ckpt.run.metrics import best_of, read_metric, with_metrics
from unified_ckpt.saving import SaveReport, save
from unified_ckpt.saving.commit import Agreement, clean_leftovers
from unified_ckpt.signals import SignalWatch, stops_training
from unified_ckpt.state import StateDict

_MOST_REPLACED = 10

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks do after a step, and why: `steps`, `minutes` or `signal`."""

    save: bool
    stop: bool
    reasons: tuple[str, ...]


class _Ask(Flag):
    """What some rank asks for after a step."""

    MINUTES = auto()
    SIGNAL = auto()
    STOP = auto()


class CheckpointManager(AbstractContextManager["CheckpointManager"]):
    """Saves, keeps and finds the checkpoints `checkpoint-{step}` of one folder.

    Every rank of the group makes one, and calls what is marked collective together with the others.
    The first rank holds the folder (by a lock, in a store by a lease), so that two jobs do not
    rotate each other's checkpoints, and removes what killed saves left. Close it, or use it as a
    context manager, to release the folder and give the signals their former handlers back.

    Args:
        folder: the folder of the run, on a file system that all ranks share, made if needed; or a
            URL (`s3://bucket/run`) or `Location` in a store.
        options: when to save and what to keep.
        group: the ranks, None for all; without process groups this one alone. A group that carries
            CPU tensors (gloo) spares a device synchronisation per decision.

    Raises:
        SaveArgumentError: (a ValueError) ranks name different folders or times to save, or signals
            cannot be watched because this is not the main thread. On every rank.
        SaveError: another process manages the folder, or it cannot be made. On every rank.
    """

    def __init__(
        self,
        folder: Path | str | Location,
        options: ManagerOptions | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        place = as_target("folder", folder)
        self.folder = place if isinstance(place, Location) else Path(os.path.realpath(place))
        self.options = options or ManagerOptions()
        self._group = group
        self._saved_at_s = time.monotonic()
        self._hold: FolderHold | None = None
        self._watch = SignalWatch(())
        with ExitStack() as undo:
            undo.callback(self.close)
            self._open()
            undo.pop_all()

    def _open(self) -> None:
        agreement = self._agreement("open")
        with agreement.phase("open", checks_arguments=True) as phase:
            options = self.options
            phase.payload = {
                "folder": str(self.folder),
                "save_steps": options.save_steps,
                "save_minutes is None": options.save_minutes is None,
                "signals": [int(number) for number in options.signals],
            }
            self._watch = SignalWatch(options.signals)
            if agreement.rank == 0:
                self._hold = self._take()
        for name in phase.payload:
            values = [result[name] for result in phase.results]
            if any(value != values[0] for value in values):
                raise SaveArgumentError(
                    f"{agreement.subject}: ranks disagree about {name}: {values}; pass the same on "
                    "every rank"
                )

    def _take(self) -> FolderHold:
        """Hold the folder, and remove what killed saves left."""
        if not isinstance(self.folder, Location):
            make_folders(self.folder)
            hold = hold_folder(self.folder, lease_s=self.options.lease_s)
            clean_leftovers(self.folder)
            return hold
        hold = hold_folder(self.folder, lease_s=self.options.lease_s)
        try:
            hold.forget(clean_stored(numbered_checkpoints(self.folder)))
        except BaseException:
            hold.close()
            raise
        return hold

    def path(self, step: int) -> Path | Location:
        """Return the place of a step's checkpoint.

        Raises:
            CheckpointTypeError: the step is no whole number.
            CheckpointValueError: the step is negative.
        """
        check_type("step", step, SupportsIndex)
        if operator.index(step) < 0:
            raise CheckpointValueError(f"step={step} is negative; count steps from 0")
        return self.folder / f"checkpoint-{operator.index(step)}"

    def begin(self, step: int) -> Path | Location:
        """Say that `checkpoint-{step}` is about to be saved, and return its place; collective.

        `save` does so; call it before another way of saving, such as in the background. In a
        directory nothing is communicated. In a store it makes sure that this job still manages the
        folder, and notes the step, so that a resume finds it whatever a listing shows.

        Raises:
            SaveArgumentError: the step is no whole number, or negative, or its name is a link's.
            SaveError: another job manages the folder by now, or the store does not answer. On
                every rank.
        """
        if not isinstance(self.folder, Location):
            return self._noted(step)
        with self._agreement(f"begin({step})").phase("begin", checks_arguments=True):
            return self._noted(step)

    def _noted(self, step: int) -> Path | Location:
        check_no_link(place := self.path(step))
        if self._hold is not None:
            self._hold.note(place.name)
        return place

    def decide(self, step: int) -> Decision:
        """Say whether to save after this step, and whether to stop; collective.

        Only signals and minutes need the other ranks: with neither, nothing is communicated.

        Raises:
            SavePeerError: a peer did not call it within the time limit.
        """
        options = self.options
        agreement = self._agreement(f"decide({step})")
        seen = self._watch.seen
        minutes = options.save_minutes
        late = minutes is not None and time.monotonic() - self._saved_at_s >= 60 * minutes
        asked = _Ask.MINUTES if late and agreement.rank == 0 else _Ask(0)
        asked |= _Ask.SIGNAL if seen else _Ask(0)
        asked |= _Ask.STOP if stops_training(seen) else _Ask(0)
        if minutes is not None or options.signals:
            asked = agreement.any_of("decide", asked)
        stop = _Ask.STOP in asked
        if _Ask.SIGNAL in asked:
            # One that came meanwhile is answered by this save, unless it asks to end.
            self._watch.clear(stopping=stop)
        causes = {
            "steps": due_by_steps(step, options.save_steps),
            "minutes": _Ask.MINUTES in asked,
            "signal": _Ask.SIGNAL in asked,
        }
        reasons = tuple(name for name, holds in causes.items() if holds)
        if reasons:  # a save in the background completes much later
            self._saved_at_s = time.monotonic()
        return Decision(save=bool(reasons), stop=stop, reasons=reasons)

    def save(
        self,
        state_dict: StateDict,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, bytes] | None = None,
        rank_files: Mapping[str, bytes] | None = None,
        options: SaveOptions | None = None,
    ) -> SaveReport:
        """Save `checkpoint-{step}` and then remove old ones; collective, as `save`.

        Args:
            state_dict: what to save, as in `save`.
            step: the number in the directory's name.
            metrics: numbers of this step, for `best_metric`, written as `metrics.json`; None writes
                no such file. The first rank's count, others' are ignored.
            files, rank_files, options: as in `save`.

        Raises:
            SaveArgumentError: as `save`; or the step or a metric is no number, or `files` has a
                `metrics.json`.
            SaveError: as `save`; nothing was removed then. In 'rotate', the new checkpoint is
                committed, but an old one could not be removed.
        """
        agreement = self._agreement(f"save({step})")
        with agreement.phase("metrics", checks_arguments=True):
            place = self._noted(step)
            if agreement.rank == 0:
                files = with_metrics(files or {}, step, metrics)
        report = save(
            state_dict,
            checkpoint_id=place,
            group=self._group,
            files=files,
            rank_files=rank_files,
            options=options,
            timeout_s=self.options.timeout_s,
        )
        with agreement.phase("rotate"):
            self.committed(step)
        return report

    def committed(self, step: int) -> list[Path | Location]:
        """Note that `checkpoint-{step}` is committed, and remove old ones; return what was removed.

        `save` calls it. After another way of saving, such as in the background, every rank calls it
        once the upload has completed; it is not collective. Save `metrics.json` (`encode_metrics`)
        with the checkpoint if `best_metric` is used.

        Raises:
            SaveError: there is no complete checkpoint of that step, or another job manages the
                folder by now.
            StoreError: the store does not answer.
        """
        self._saved_at_s = time.monotonic()
        limit = self.options.save_total_limit
        if limit is None or self._hold is None:
            return []
        if not is_complete(self.path(step)):
            raise SaveError(f"{self.path(step)} is not complete, so no older one is removed")
        self._hold.note(self.path(step).name)
        protect = [self.path(step), self.best() or self.path(step)]
        removed = rotate(self.folder, limit, protect=protect)
        self._hold.forget([place.name for place in removed])
        return removed

    def best(self) -> Path | Location | None:
        """Return the complete checkpoint whose `best_metric` is best, or None; reads only.

        Raises:
            StoreError: the store does not answer.
        """
        if self.options.best_metric is None:
            return None
        complete = {p.name: p for p in numbered_checkpoints(self.folder) if is_complete(p)}
        metric = self.options.best_metric
        values = {name: read_metric(path, metric) for name, path in complete.items()}
        best = best_of(values, self.options.best_mode)
        return None if best is None else complete[best]

    def resume(
        self, load_one: Callable[[Any], _T], *, verify: Depth = "quick"
    ) -> tuple[Path | Location, _T] | None:
        """Load the newest valid checkpoint, falling back to older ones; collective.

        All ranks load the one that the first rank has checked. If `load_one` finds damage on any
        (it raises `CorruptCheckpointError`, or an OSError for what cannot be read), all warn and
        try the next older one; destinations that were filled are filled again. If the checkpoint is
        replaced or removed meanwhile, all look for the newest one again.

        Args:
            load_one: loads this rank's share from a directory (a `Path`) or a `Location`, for
                example with `load`.
            verify: what the first rank compares before (`find_fault`).

        Returns:
            The place and what `load_one` returned, or None if there is no valid checkpoint.

        Raises:
            ReplacedCheckpointError: checkpoints were replaced again and again. On every rank.
            LoadError: `load_one` failed on some rank for another reason. On every rank.
            SaveError: the first rank cannot list the folder, or the store does not answer: no older
                checkpoint is taken for that. On every rank.
            SavePeerError: a peer did not arrive within the time limit.
            CheckpointValueError: `verify` is neither `quick` nor `full`.
        """
        check_depth(verify)
        agreement = self._agreement("resume")
        candidates = checked_checkpoints(self.folder, verify=verify)
        damaged: set[str] = set()
        replaced = 0
        while True:
            with agreement.phase("list") as phase:  # one at a time: a full check reads all bytes
                found = next(candidates, None) if agreement.rank == 0 else None
                phase.payload = None if found is None else [found[0].name, found[1]]
            if phase.results[0] is None:
                return None
            path, identity = self.folder / phase.results[0][0], phase.results[0][1]
            if path.name in damaged:
                continue
            try:
                return path, _load_together(agreement, load_one, path, identity)
            except ReplacedCheckpointError:
                replaced += 1
                if replaced == _MOST_REPLACED:
                    raise
                candidates = checked_checkpoints(self.folder, verify=verify)
            except CorruptCheckpointError as error:
                damaged.add(path.name)
                warnings.warn(
                    f"{path} is damaged, the next older one is loaded: {error}",
                    DamagedCheckpointWarning,
                    stacklevel=2,
                )

    def load_named(self, path: Path | Location, load_one: Callable[[Path | Location], _T]) -> _T:
        """Load one checkpoint by its name, the same one on all ranks; collective.

        All that `load_one` reads there, in any number of calls, is of one checkpoint. Raises, on
        every rank, as `resume`, also for damage and for a replacement: nothing stands in for it.
        """
        return _load_together(self._agreement("load_named"), load_one, path, None)

    def close(self) -> None:
        """Release the folder and give the signals their former handlers back."""
        self._watch.close()
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agreement(self, call: str) -> Agreement:
        subject = f"CheckpointManager({str(self.folder)!r}).{call}"
        return Agreement(self._group, timeout_s=self.options.timeout_s, subject=subject)


def due_by_steps(step: int, save_steps: int | None) -> bool:
    """Whether a step is one after which to save."""
    return save_steps is not None and step > 0 and step % save_steps == 0


def _load_together(
    agreement: Agreement, load_one: Callable[[Any], _T], path: Path | Location, wanted: str | None
) -> _T:
    """Load on every rank from the same directory, which the name leads to all the while."""
    try:
        return read_together(agreement, path, lambda _: load_one(path), identity=wanted, attempts=1)
    except (CorruptCheckpointError, ReplacedCheckpointError):
        raise
    except (LoadError, CheckpointValueError) as error:
        raise LoadError(f"{error}; {path} was being loaded") from error

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Literal, SupportsIndex, TypeVar

import torch.distributed as dist

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    DamagedCheckpointWarning,
    LoadError,
    ReplacedCheckpointError,
    SaveArgumentError,
    SaveError,
    as_path,
    check_type,
)
from unified_ckpt.files import lock_folder, make_folders, unlock_folder
from unified_ckpt.folders import (
    Depth,
    check_depth,
    is_complete,
    numbered_checkpoints,
    rotate,
    valid_checkpoints,
)
from unified_ckpt.loading import read_together
from unified_ckpt.options import SaveOptions
from unified_ckpt.run.metrics import best_of, read_metric, with_metrics
from unified_ckpt.saving import SaveReport, save
from unified_ckpt.saving.commit import Agreement, clean_leftovers
from unified_ckpt.signals import DEFAULT_SIGNALS, Signals, SignalWatch, stops_training
from unified_ckpt.state import StateDict

_LOCK_WAIT_S = 10.0  # children of a job that was killed hold its lock until they notice

_MOST_REPLACED = 10

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """When to save and what to keep; the same on every rank.

    Attributes:
        save_steps: save when the step is a multiple of it; None for never.
        save_minutes: save when so many minutes have passed since the last save, or since a decision
            for one, by the clock of the group's first rank; None for never.
        save_total_limit: how many of the newest checkpoints stay; None for all.
        best_metric: name of the metric whose best checkpoint stays as well; None for none.
        best_mode: whether the best is the least (`min`) or the greatest (`max`).
        signals: which signals ask for a save; SIGTERM and SIGINT ask to stop after it as well.
        timeout_s: bound on each wait for the other ranks.

    Raises:
        CheckpointValueError: a number is not positive, or `best_mode` is unknown.
    """

    save_steps: int | None = None
    save_minutes: float | None = None
    save_total_limit: int | None = None
    best_metric: str | None = None
    best_mode: Literal["min", "max"] = "min"
    signals: Sequence[Signals] = DEFAULT_SIGNALS
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("save_steps", "save_minutes", "save_total_limit", "timeout_s"):
            value = getattr(self, name)
            check_type(name, value, int, float, type(None))
            if value is not None and not value > 0:
                raise CheckpointValueError(f"{name}={value!r} must be positive, or None")
        if self.best_mode not in ("min", "max"):
            raise CheckpointValueError(f"best_mode={self.best_mode!r}; expected 'min' or 'max'")


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
    The first rank holds a lock on the folder, so that two jobs do not rotate each other's
    checkpoints, and removes what killed saves left. Close it, or use it as a context manager, to
    release the lock and give the signals their former handlers back.

    Args:
        folder: the folder of the run, on a file system that all ranks share; made if needed.
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
        folder: Path | str,
        options: ManagerOptions | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(os.path.realpath(as_path("folder", folder)))
        self.options = options or ManagerOptions()
        self._group = group
        self._saved_at_s = time.monotonic()
        self._lock_fd = -1
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
                make_folders(self.folder)
                self._lock_fd = _lock(self.folder)
                clean_leftovers(self.folder)
        for name in phase.payload:
            values = [result[name] for result in phase.results]
            if any(value != values[0] for value in values):
                raise SaveArgumentError(
                    f"{agreement.subject}: ranks disagree about {name}: {values}; pass the same on "
                    "every rank"
                )

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint.

        Raises:
            CheckpointTypeError: the step is no whole number.
            CheckpointValueError: the step is negative.
        """
        check_type("step", step, SupportsIndex)
        if operator.index(step) < 0:
            raise CheckpointValueError(f"step={step} is negative; count steps from 0")
        return self.folder / f"checkpoint-{operator.index(step)}"

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
            place = self.path(step)
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

    def committed(self, step: int) -> list[Path]:
        """Note that `checkpoint-{step}` is committed, and remove old ones; return what was removed.

        `save` calls it. After another way of saving, such as in the background, every rank calls it
        once the upload has completed; it is not collective. Save `metrics.json` (`encode_metrics`)
        with the checkpoint if `best_metric` is used.

        Raises:
            SaveError: there is no complete checkpoint of that step.
        """
        self._saved_at_s = time.monotonic()
        limit = self.options.save_total_limit
        if limit is None or self._lock_fd < 0:
            return []
        if not is_complete(self.path(step)):
            raise SaveError(f"{self.path(step)} is not complete, so no older one is removed")
        protect = {self.path(step), self.best() or self.path(step)}
        return rotate(self.folder, limit, protect=protect)

    def best(self) -> Path | None:
        """Return the complete checkpoint whose `best_metric` is best, or None; reads only."""
        if self.options.best_metric is None:
            return None
        complete = [path for path in numbered_checkpoints(self.folder) if is_complete(path)]
        values = {path: read_metric(path, self.options.best_metric) for path in complete}
        return best_of(values, self.options.best_mode)

    def resume(
        self, load_one: Callable[[Path], _T], *, verify: Depth = "quick"
    ) -> tuple[Path, _T] | None:
        """Load the newest valid checkpoint, falling back to older ones; collective.

        All ranks load the same one. If `load_one` finds damage on any rank (it raises
        `CorruptCheckpointError`, or an OSError for what cannot be read), all of them warn and try
        the next older one; destinations that were filled are filled again. If the checkpoint is
        replaced or removed while any rank loads it, all look for the newest one again.

        Args:
            load_one: loads this rank's share from a directory, for example with `load`.
            verify: what the first rank compares before (`find_fault`).

        Returns:
            The directory and what `load_one` returned, or None if there is no valid checkpoint.

        Raises:
            ReplacedCheckpointError: checkpoints were replaced again and again. On every rank.
            LoadError: `load_one` failed on some rank for another reason. On every rank.
            SaveError: the first rank cannot list the folder. On every rank.
            SavePeerError: a peer did not arrive within the time limit.
            CheckpointValueError: `verify` is neither `quick` nor `full`.
        """
        check_depth(verify)
        agreement = self._agreement("resume")
        candidates = valid_checkpoints(self.folder, verify=verify)
        damaged: set[Path] = set()
        replaced = 0
        while True:
            with agreement.phase("list") as phase:  # one at a time: a full check reads all bytes
                found = next(candidates, None) if agreement.rank == 0 else None
                phase.payload = None if found is None else str(found)
            if phase.results[0] is None:
                return None
            path = Path(phase.results[0])
            if path in damaged:
                continue
            try:
                return path, _load_together(agreement, load_one, path)
            except ReplacedCheckpointError:
                replaced += 1
                if replaced == _MOST_REPLACED:
                    raise
                candidates = valid_checkpoints(self.folder, verify=verify)
            except CorruptCheckpointError as error:
                damaged.add(path)
                warnings.warn(
                    f"{path} is damaged, the next older one is loaded: {error}",
                    DamagedCheckpointWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Release the folder and give the signals their former handlers back."""
        self._watch.close()
        if self._lock_fd >= 0:
            unlock_folder(self._lock_fd)
            self._lock_fd = -1

    def __exit__(self, *_: object) -> None:
        self.close()

    def _agreement(self, call: str) -> Agreement:
        subject = f"CheckpointManager({str(self.folder)!r}).{call}"
        return Agreement(self._group, timeout_s=self.options.timeout_s, subject=subject)


def due_by_steps(step: int, save_steps: int | None) -> bool:
    """Whether a step is one after which to save."""
    return save_steps is not None and step > 0 and step % save_steps == 0


def _load_together(agreement: Agreement, load_one: Callable[[Path], _T], path: Path) -> _T:
    """Load on every rank from the same directory, which the name leads to all the while."""
    try:
        return read_together(agreement, path, lambda _: load_one(path), attempts=1)
    except (CorruptCheckpointError, ReplacedCheckpointError):
        raise
    except (LoadError, CheckpointValueError) as error:
        raise LoadError(f"{error}; {path} was being loaded") from error


def _lock(folder: Path) -> int:
    try:
        return lock_folder(folder, wait_s=_LOCK_WAIT_S)[0]  # without locks saves are safe as well
    except BlockingIOError as error:
        raise BlockingIOError(
            f"another process manages {folder} and has held its lock for {_LOCK_WAIT_S:g} s; end "
            "it, or use another folder"
        ) from error

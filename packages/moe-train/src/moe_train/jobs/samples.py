"""Which samples a run has used, from the ledger of a checkpoint: `moe-train inspect DIR --samples`.

Needs the checkpoint alone: ids are numbers of sources and sequences, which follow from what the
ledger stores. Invariant: what is reported is recomputed; a step whose check value does not belong
to its ids, a step or a sample that is missing or used twice is a fault.

    audit = audit_samples(Path("checkpoint-40"))
    audit.faults                            # () when every sample was used once
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_train.checkpoint import TrainerState, newest_checkpoint, read_ledger, read_state
from moe_train.data import DataIdentity, Ledger, check_value, id_hashes
from moe_train.errors import TrainValueError, check_type
from unified_ckpt.files.storage import Location, as_target
from unified_ckpt.plans.checkpoint import is_stored

_CHUNK_SAMPLES = 1 << 16
_MOST_FAULTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIds:
    """What one step has read.

    Attributes:
        step: its number.
        skipped: its update was not applied.
        sample: sample numbers, int64 [N].
        source, sequence: the ids of the samples, int64 [N].
        epoch: how often the source had been read whole before, int64 [N].
        data: what the numbers mean.
        is_proved: the check value of the step is that of these ids.
    """

    step: int
    skipped: bool
    sample: NDArray[np.int64]
    source: NDArray[np.int64]
    sequence: NDArray[np.int64]
    epoch: NDArray[np.int64]
    data: DataIdentity
    is_proved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesAudit:
    """What the ledger of a checkpoint says, as lines of text, and what is wrong with it."""

    lines: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def text(self) -> str:
        """The lines, and the faults or that there are none."""
        shown = [f"fault       {fault}" for fault in self.faults[:_MOST_FAULTS]]
        if len(self.faults) > _MOST_FAULTS:
            shown.append(f"faults      {len(self.faults) - _MOST_FAULTS} more")
        return "\n".join([*self.lines, *(shown or ["result      no gap and no double"])])


def audit_samples(path: Path | str) -> SamplesAudit:
    """Recompute and check the ledger of a checkpoint, or of the newest one of a run.

    Raises:
        ValueError: there is no checkpoint, or its ledger cannot be read.
    """
    folder = checkpoint_folder(path)
    audit = audit_ledger(read_ledger(folder), read_state(folder))
    return replace(audit, lines=(str(folder), *audit.lines))


def audit_ledger(ledger: Ledger, state: TrainerState) -> SamplesAudit:
    """Recompute and check a ledger that shall lead to `state`."""
    counts: dict[DataIdentity, list[NDArray[np.int64]]] = {}
    faults, num_steps = [], 0
    for ids in step_ids(ledger):
        num_steps += 1
        if not ids.is_proved:
            faults.append(f"step {ids.step} has read other samples than the ledger says")
        if ids.data not in counts:
            counts[ids.data] = [np.zeros(s.num_sequences, np.int64) for s in ids.data.sources]
        for place, used in enumerate(counts[ids.data]):
            np.add.at(used, ids.sequence[ids.source == place], 1)
    num_proved = num_steps - len(faults)
    faults += _gaps(ledger, state)
    lines = _segment_lines(ledger)
    for data, used_by_source in counts.items():
        lines += [
            _source_line(source.name, used, len(counts) > 1 and data.fingerprint[:12])
            for source, used in zip(data.sources, used_by_source, strict=True)
        ]
    lines.append(f"checks      {num_proved} of {num_steps} steps have read what the ledger says")
    return SamplesAudit(lines=tuple(lines), faults=tuple(faults))


def write_samples(path: Path | str, target: Path) -> int:
    """Write one line of CSV for each sample: step, skipped, sample, epoch, source, sequence.

    Returns:
        The number of samples.

    Raises:
        ValueError: there is no checkpoint, or its ledger cannot be read.
    """
    check_type("target", target, Path)
    num_samples = 0
    ledger = read_ledger(checkpoint_folder(path))
    with target.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["step", "skipped", "sample", "epoch", "source", "sequence"])
        for ids in step_ids(ledger):
            columns = (ids.sample, ids.epoch, ids.source, ids.sequence)
            for sample, epoch, place, sequence in zip(*columns, strict=True):
                name = ids.data.sources[place].name
                writer.writerow([ids.step, int(ids.skipped), sample, epoch, name, sequence])
            num_samples += len(ids.sample)
    return num_samples


def checkpoint_folder(path: Path | str | Location) -> Path | Location:
    """A checkpoint's folder: the given one, or the newest in a run's output folder or store.

    Raises:
        ValueError: there is none.
    """
    check_type("path", path, Path, str, Location)
    path = as_target("checkpoint", path)
    if isinstance(path, Location):
        found = path if is_stored(path) else newest_checkpoint(path)
        if found is None:
            raise TrainValueError(f"{path} holds no complete checkpoint; name one, or a run")
        return found
    if not path.is_dir():
        raise TrainValueError(
            f"{path} is not a folder; name a checkpoint-N folder or an output folder"
        )
    folder = path if (path / "config.json").is_file() else newest_checkpoint(path)
    if folder is None:
        raise TrainValueError(f"{path} holds no complete checkpoint")
    return folder


def step_ids(ledger: Ledger) -> Iterator[StepIds]:
    """The ids of every step in turn."""
    for segment in ledger.segments:
        order, size = segment.data.order(), segment.global_batch_size
        steps_at_once = max(1, _CHUNK_SAMPLES // size)
        lengths = np.array([source.num_sequences for source in segment.data.sources])
        skipped = set(segment.skipped)
        for first in range(segment.first_step, segment.end_step, steps_at_once):
            steps = range(first, min(segment.end_step, first + steps_at_once))
            start = segment.first_sample + (first - segment.first_step) * size
            sample = np.arange(start, start + len(steps) * size, dtype=np.int64).reshape(-1, size)
            source, sequence = order.locate(sample)
            epoch = order.mixture.locate(sample)[1] // lengths[source]
            sums = id_hashes(source, sequence).sum(axis=1).tolist()
            for row, step in enumerate(steps):
                found = segment.checks[step - segment.first_step]
                yield StepIds(
                    step=step,
                    skipped=step in skipped,
                    sample=sample[row],
                    source=source[row],
                    sequence=sequence[row],
                    epoch=epoch[row],
                    data=segment.data,
                    is_proved=found == check_value(size, sums[row]),
                )


def _gaps(ledger: Ledger, state: TrainerState) -> list[str]:
    """Steps and samples that are missing or there twice, up to where the checkpoint stands."""
    faults: list[str] = []
    next_step, next_sample = 1, 0
    for segment in ledger.segments:
        faults += _fault("step", next_step, segment.first_step, f"step {segment.first_step}")
        faults += _fault("sample", next_sample, segment.first_sample, f"step {segment.first_step}")
        next_step, next_sample = segment.end_step, segment.end_sample
    faults += _fault("step", next_step, state.step + 1, "the checkpoint")
    return faults + _fault("sample", next_sample, state.consumed_samples, "the checkpoint")


def _fault(what: str, expected: int, found: int, place: str) -> list[str]:
    if found > expected:
        return [f"{what}s {expected} to {found - 1} are missing before {place}"]
    if found < expected:
        return [f"{what}s {found} to {expected - 1} are there twice, again from {place} on"]
    return []


def _segment_lines(ledger: Ledger) -> list[str]:
    lines = []
    for segment in ledger.segments:
        data = segment.data
        text = (
            f"steps       {segment.first_step} to {segment.end_step - 1}: samples "
            f"{segment.first_sample} to {segment.end_sample - 1}, {segment.global_batch_size} a "
            f"step of {data.sequence_length} tokens, seed {data.seed}, data {data.fingerprint[:12]}"
        )
        if segment.skipped:
            text += f", {len(segment.skipped)} without an update"
        lines.append(text)
    return lines or ["steps       none are recorded"]


def _source_line(name: str, used: NDArray[np.int64], data: str | bool) -> str:
    """How often the sequences of a source were read."""
    often = np.bincount(used)
    words = {0: "never", 1: "once", 2: "twice"}
    times = [
        f"{count:,} {words.get(number, f'{number} times')}"
        for number, count in enumerate(often.tolist())
        if count
    ]
    label = f"source {name}" + (f" (data {data})" if data else "")
    return (
        f"{label:<11} {used.sum():,} samples of {len(used):,} sequences, "
        f"{used.sum() / len(used):.2f} epochs: {', '.join(times)}"
    )

"""Which samples each step of a run has used, and a check value of what the ranks really read.

Invariant: the ledger is part of a checkpoint and holds the steps that led to it, each once. Runs of
steps with the same batch size and data are one segment; the ids of a step follow from its segment
by arithmetic (`MixtureOrder`), without the corpus. The check value of a step is made of the ids
that its ranks read, summed over them, so a ledger that says something else is found out.

    ledger = Ledger()
    ledger.record(step=1, first_sample=0, global_batch_size=16, data=data, check=check)
    Ledger.from_json(ledger.to_json(), "samples.json").segments
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.data.mixture import MixtureOrder, SourceShare
from moe_train.errors import TrainValueError

_HASH_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DataIdentity:
    """What gives sample numbers their meaning."""

    fingerprint: str
    sequence_length: int
    seed: int
    sources: tuple[SourceShare, ...]

    def order(self, begin: Sequence[int] = ()) -> MixtureOrder:
        """Which sequence each sample number means; `begin` as in `Mixture`."""
        return MixtureOrder(self.sources, self.seed, begin)


@dataclass(slots=True, kw_only=True)
class Segment:
    """Consecutive steps that read consecutive samples.

    Attributes:
        first_step: number of the first step.
        first_sample: the first sample that it read.
        global_batch_size: samples of each step.
        data: what the sample numbers mean.
        checks: a check value for each step.
        skipped: steps whose update was not applied; their samples were read all the same.
    """

    first_step: int
    first_sample: int
    global_batch_size: int
    data: DataIdentity
    checks: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    @property
    def end_step(self) -> int:
        """The step behind the last one."""
        return self.first_step + len(self.checks)

    @property
    def end_sample(self) -> int:
        """The sample behind the last one."""
        return self.first_sample + len(self.checks) * self.global_batch_size

    def samples(self, step: int) -> NDArray[np.int64]:
        """Sample numbers of one of its steps, int64 [global_batch_size]."""
        first = self.first_sample + (step - self.first_step) * self.global_batch_size
        return np.arange(first, first + self.global_batch_size, dtype=np.int64)


@dataclass(slots=True)
class Ledger:
    """The segments of a run, in the order in which they were read."""

    segments: list[Segment] = field(default_factory=list)

    def record(
        self,
        *,
        step: int,
        first_sample: int,
        global_batch_size: int,
        data: DataIdentity,
        check: int,
        skipped: bool = False,
    ) -> None:
        """Add a finished step.

        Args:
            check: `check_value` of what the ranks have read.
            skipped: its update was not applied.
        """
        last = self.segments[-1] if self.segments else None
        if (
            last is None
            or (last.end_step, last.end_sample) != (step, first_sample)
            or (last.global_batch_size, last.data) != (global_batch_size, data)
        ):
            last = Segment(
                first_step=step,
                first_sample=first_sample,
                global_batch_size=global_batch_size,
                data=data,
            )
            self.segments.append(last)
        last.checks.append(check)
        if skipped:
            last.skipped.append(step)

    def to_json(self) -> bytes:
        """The ledger as a file of a checkpoint: four bytes a step, and a few lines a segment."""
        segments = [
            {
                "first_step": segment.first_step,
                "last_step": segment.end_step - 1,
                "first_sample": segment.first_sample,
                "global_batch_size": segment.global_batch_size,
                **asdict(segment.data),
                "skipped_steps": segment.skipped,
                "checks": base64.b64encode(np.array(segment.checks, "<u4").tobytes()).decode(),
            }
            for segment in self.segments
        ]
        return (json.dumps({"format": 1, "segments": segments}, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, source: object) -> "Ledger":
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else; the message begins with `source`.
        """
        try:
            values = json.loads(text)
            if values["format"] != 1:
                raise TrainValueError(f"format {values['format']!r}, expected 1")
            return cls([_segment(item) for item in values["segments"]])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TrainValueError(f"{source} is no ledger of samples: {error!r}") from error


def id_hashes(source: NDArray[np.int64], sequence: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 32-bit hash of each (source, sequence), int64; sums of 2**21 are exact in float64."""
    values = (source.astype(np.uint64) << np.uint64(48)) ^ sequence.astype(np.uint64)
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values >> np.uint64(64 - _HASH_BITS)).astype(np.int64)


def check_value(num_samples: int, hash_sum: int) -> int:
    """The check value of a step, below 2**32: from how many ids were read and their hashes' sum."""
    return (hash_sum + num_samples * 0x9E3779B1) % (1 << _HASH_BITS)


def _segment(values: dict[str, Any]) -> Segment:
    checks = np.frombuffer(base64.b64decode(values["checks"], validate=True), "<u4").tolist()
    segment = Segment(
        first_step=int(values["first_step"]),
        first_sample=int(values["first_sample"]),
        global_batch_size=int(values["global_batch_size"]),
        data=DataIdentity(
            fingerprint=str(values["fingerprint"]),
            sequence_length=int(values["sequence_length"]),
            seed=int(values["seed"]),
            sources=tuple(SourceShare(**source) for source in values["sources"]),
        ),
        checks=checks,
        skipped=[int(step) for step in values["skipped_steps"]],
    )
    if segment.end_step - 1 != values["last_step"]:
        raise TrainValueError(f"last_step={values['last_step']} with {len(checks)} check values")
    return segment

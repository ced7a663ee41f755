"""Which samples a rank reads for a step, and the microbatches made of them.

Sample s of the run is the same sequence in every layout: a step takes `global_batch_size`
consecutive samples, microbatch m an equal run of them, sample rank r an equal run of that. With
context parallelism several ranks have the same sample rank: they read the same, cut it in the
stage, and the first of them alone counts it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.data import Batch, DataIdentity, JoinedSplit, id_hashes
from moe_train.labels import IGNORED_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a global batch is cut; sizes in sequences. The caller has checked that they divide."""

    global_batch_size: int
    num_microbatches: int
    sample_rank: int
    num_sample_ranks: int

    def samples(self, first_sample: int) -> list[NDArray[np.int64]]:
        """Sample numbers of this rank, one array for each microbatch."""
        per_microbatch = self.global_batch_size // self.num_microbatches
        per_rank = per_microbatch // self.num_sample_ranks
        offset = first_sample + self.sample_rank * per_rank
        starts = [offset + m * per_microbatch for m in range(self.num_microbatches)]
        return [np.arange(start, start + per_rank, dtype=np.int64) for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """What is known of the sequences that one rank has read for a step.

    Attributes:
        num_predicted: labels that are predicted.
        num_samples: sequences read.
        hash_sum: sum of `id_hashes` of the sequences.
    """

    num_predicted: int = 0
    num_samples: int = 0
    hash_sum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """What one rank reads for one step: a batch for each microbatch, or none, and its account.

    `turns` is where those of a mixture of sources begin that are known, as `Mixture` takes it.
    """

    batches: tuple[Batch, ...] = ()
    read: SamplesRead = SamplesRead()
    turns: tuple[int, ...] = ()


class SampleReader:
    """Makes this rank's batches of any step; remembers nothing that changes them.

    Args:
        train: None on stages that need no tokens: their batches are empty.
        begin: where a mixture's turns may begin, as an earlier step's `turns`.
    """

    def __init__(
        self,
        train: JoinedSplit | None,
        data: DataIdentity,
        plan: BatchPlan,
        begin: Sequence[int] = (),
    ) -> None:
        self._train, self._plan = train, plan
        self._order = data.order(begin)

    def read(self, first_sample: int) -> StepBatches:
        """The microbatches of the step that begins with sample `first_sample`, on the CPU."""
        if self._train is None:
            return StepBatches()
        batches, num_samples, hash_sum = [], 0, 0
        for samples in self._plan.samples(first_sample):
            source, sequence = self._order.locate(samples)
            batches.append(self._train.rows(source, sequence))
            num_samples += len(sequence)
            hash_sum += int(id_hashes(source, sequence).sum())
        read = SamplesRead(
            num_predicted=count_predictions(batches), num_samples=num_samples, hash_sum=hash_sum
        )
        turns = self._order.mixture.begin_of(first_sample)
        return StepBatches(batches=tuple(batches), read=read, turns=turns)


def validation_steps(split: JoinedSplit, count: int, plan: BatchPlan) -> Iterator[list[Batch]]:
    """The first `count` sequences of the split, in batches shaped as in training.

    The last batch is filled up with rows of padding, which no expert sees, so that every rank runs
    the same number of microbatches and the mean is over exactly `count` sequences.
    """
    for first in range(0, count, plan.global_batch_size):
        yield [_with_padding(split, samples, count) for samples in plan.samples(first)]


def count_predictions(batches: Sequence[Batch]) -> int:
    """How many labels are predicted (not ignored)."""
    return sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)


def _with_padding(split: JoinedSplit, samples: NDArray[np.int64], count: int) -> Batch:
    batch = split.batch(np.minimum(samples, count - 1))
    is_filler = torch.from_numpy(samples >= count)[:, None]
    return Batch(
        input_ids=batch.input_ids,
        labels=batch.labels.masked_fill(is_filler, IGNORED_LABEL),
        position_ids=batch.position_ids.masked_fill(is_filler, -1),
    )

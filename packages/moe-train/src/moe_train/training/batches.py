"""Which samples a rank reads for a step, and the microbatches made of them.

Sample s of the run is the same sequence in every layout: a step takes `global_batch_size`
consecutive samples, microbatch m an equal run of them, data rank r an equal run of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.data import Batch, PackedSplit, SampleOrder
from moe_train.labels import IGNORED_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a global batch is cut; sizes in sequences. The caller has checked that they divide."""

    global_batch_size: int
    num_microbatches: int
    data_rank: int
    num_data_ranks: int

    def samples(self, first_sample: int) -> list[NDArray[np.int64]]:
        """Sample numbers of this rank, one array for each microbatch."""
        per_microbatch = self.global_batch_size // self.num_microbatches
        per_rank = per_microbatch // self.num_data_ranks
        offset = first_sample + self.data_rank * per_rank
        starts = [offset + m * per_microbatch for m in range(self.num_microbatches)]
        return [np.arange(start, start + per_rank, dtype=np.int64) for start in starts]


def training_microbatches(
    split: PackedSplit, order: SampleOrder, plan: BatchPlan, first_sample: int
) -> list[Batch]:
    """This rank's microbatches of the step that begins with sample `first_sample`."""
    return [split.batch(order.sequence_of(samples)) for samples in plan.samples(first_sample)]


def validation_steps(split: PackedSplit, count: int, plan: BatchPlan) -> Iterator[list[Batch]]:
    """The first `count` sequences of the split, in batches shaped as in training.

    The last batch is filled up with sequences whose labels are all ignored, so that every rank
    runs the same number of microbatches and the mean is over exactly `count` sequences.
    """
    for first in range(0, count, plan.global_batch_size):
        yield [_with_padding(split, samples, count) for samples in plan.samples(first)]


def count_predictions(batches: Sequence[Batch]) -> int:
    """How many labels are predicted (not ignored)."""
    return sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)


def _with_padding(split: PackedSplit, samples: NDArray[np.int64], count: int) -> Batch:
    batch = split.batch(np.minimum(samples, count - 1))
    labels = batch.labels.masked_fill(torch.from_numpy(samples >= count)[:, None], IGNORED_LABEL)
    return Batch(input_ids=batch.input_ids, labels=labels, position_ids=batch.position_ids)

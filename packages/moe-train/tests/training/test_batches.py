from pathlib import Path

import numpy as np
import pytest
import torch

from moe_train.data.order import SampleOrder
from moe_train.data.packing import Batch, PackedSplit
from moe_train.data.token_store import write_store
from moe_train.training.batches import (
    BatchPlan,
    count_predictions,
    training_microbatches,
    validation_steps,
)


@pytest.fixture
def split(tmp_path: Path) -> PackedSplit:
    tokens = np.random.default_rng(0).integers(1, 50, size=8 * 25 + 1)
    write_store(tmp_path / "tokens.bin", [tokens], vocab_size=64)
    return PackedSplit(tmp_path / "tokens.bin", 8, 0, False)


def plan_of(rank: int, ranks: int, microbatches: int = 2, size: int = 12) -> BatchPlan:
    return BatchPlan(
        global_batch_size=size, num_microbatches=microbatches, data_rank=rank, num_data_ranks=ranks
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_every_layout_reads_the_same_samples_in_the_same_microbatches(ranks: int) -> None:
    parts = [plan_of(rank, ranks).samples(36) for rank in range(ranks)]
    for microbatch in range(2):
        joined = np.concatenate([part[microbatch] for part in parts])
        assert joined.tolist() == list(range(36 + 6 * microbatch, 42 + 6 * microbatch))


def test_training_reads_the_sequences_that_the_order_names(split: PackedSplit) -> None:
    order = SampleOrder(split.num_sequences, 4)
    batches = training_microbatches(split, order, plan_of(1, 2), 24)
    expected = split.batch(order.sequence_of(np.array([27, 28, 29])))
    assert torch.equal(batches[0].input_ids, expected.input_ids)
    assert len(batches) == 2


def test_validation_covers_each_sequence_once_whatever_the_layout(split: PackedSplit) -> None:
    count = 17
    whole = split.batch(np.arange(count))
    for ranks in (1, 2, 3):
        predicted = 0
        seen = []
        for rank in range(ranks):
            for step in validation_steps(split, count, plan_of(rank, ranks)):
                predicted += count_predictions(step)
                seen += [row for batch in step for row in rows(batch)]
        assert predicted == count_predictions([whole])
        assert sorted(seen) == sorted(rows(whole))


def rows(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in batch.labels if bool((row != -100).any())]

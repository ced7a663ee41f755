from pathlib import Path

import numpy as np
import pytest
import torch

from moe_train.data.joined import JoinedSplit
from moe_train.data.ledger import DataIdentity, id_hashes
from moe_train.data.mixture import Mixture, SourceShare
from moe_train.data.order import SampleOrder
from moe_train.data.packing import Batch, SequenceForm, open_split
from moe_train.data.token_store import write_store
from moe_train.training.batches import (
    BatchPlan,
    SampleReader,
    StepBatches,
    count_predictions,
    validation_steps,
)


@pytest.fixture
def split(tmp_path: Path) -> JoinedSplit:
    """25 sequences of 8 tokens of one source, and 12 of another."""
    form = SequenceForm(length=8, pad_token_id=0, reset_at_documents=False)
    splits = []
    for count in (25, 12):
        tokens = np.random.default_rng(count).integers(1, 50, size=8 * count + 1)
        write_store(tmp_path / f"{count}.bin", [tokens], vocab_size=64)
        splits.append(open_split(tmp_path / f"{count}.bin", "stream", form))
    return JoinedSplit(names=("a", "b"), splits=tuple(splits), order=Mixture([25, 12]))


def identity(split: JoinedSplit, *weights: str) -> DataIdentity:
    sources = tuple(
        SourceShare(name=name, weight=weight, num_sequences=part.num_sequences)
        for name, weight, part in zip(split.names, weights, split.splits, strict=False)
    )
    return DataIdentity(fingerprint="f", sequence_length=8, seed=4, sources=sources)


def plan_of(rank: int, ranks: int, microbatches: int = 2, size: int = 12) -> BatchPlan:
    return BatchPlan(
        global_batch_size=size,
        num_microbatches=microbatches,
        sample_rank=rank,
        num_sample_ranks=ranks,
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_every_layout_reads_the_same_samples_in_the_same_microbatches(ranks: int) -> None:
    parts = [plan_of(rank, ranks).samples(36) for rank in range(ranks)]
    for microbatch in range(2):
        joined = np.concatenate([part[microbatch] for part in parts])
        assert joined.tolist() == list(range(36 + 6 * microbatch, 42 + 6 * microbatch))


def test_training_reads_the_sequences_that_the_order_names(split: JoinedSplit) -> None:
    reader = SampleReader(split, identity(split, "1"), plan_of(1, 2))
    step = reader.read(24)
    sequences = SampleOrder(25, 4).sequence_of(np.array([27, 28, 29]))
    expected = split.splits[0].batch(sequences)
    assert torch.equal(step.batches[0].input_ids, expected.input_ids)
    assert len(step.batches) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_mixture_is_read_alike_by_any_number_of_ranks(split: JoinedSplit, ranks: int) -> None:
    data = identity(split, "0.7", "0.3")
    parts = [SampleReader(split, data, plan_of(rank, ranks)).read(600) for rank in range(ranks)]
    source, sequence = data.order().locate(np.arange(600, 612))
    expected = split.rows(source, sequence)
    for microbatch in range(2):
        joined = torch.cat([part.batches[microbatch].labels for part in parts])
        assert torch.equal(joined, expected.labels[6 * microbatch : 6 * microbatch + 6])
    assert {0, 1} == set(source.tolist())
    assert sum(part.read.num_samples for part in parts) == 12
    assert sum(part.read.hash_sum for part in parts) == id_hashes(source, sequence).sum()
    assert sum(part.read.num_predicted for part in parts) == 12 * 8


def test_a_stage_without_tokens_reads_nothing(split: JoinedSplit) -> None:
    assert SampleReader(None, identity(split, "1", "1"), plan_of(0, 1)).read(0) == StepBatches()


def test_validation_covers_each_sequence_once_whatever_the_layout(split: JoinedSplit) -> None:
    count = 31
    whole = split.batch(np.arange(count))
    for ranks in (1, 2, 3):
        predicted = 0
        seen = []
        for rank in range(ranks):
            for step in validation_steps(split, count, plan_of(rank, ranks)):
                predicted += count_predictions(step)
                seen += [row for batch in step for row in rows(batch)]
                for batch in step:
                    is_filler = (batch.labels == -100).all(1)
                    assert bool((batch.position_ids[is_filler] == -1).all())
                    assert bool((batch.position_ids[~is_filler] >= 0).all())
        assert predicted == count_predictions([whole])
        assert sorted(seen) == sorted(rows(whole))


def rows(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in batch.labels if bool((row != -100).any())]

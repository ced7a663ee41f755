from pathlib import Path

import numpy as np
import pytest
import torch

from moe_train.data.joined import JoinedSplit
from moe_train.data.ledger import DataIdentity
from moe_train.data.mixture import Mixture, SourceShare
from moe_train.data.packing import SequenceForm, open_split
from moe_train.data.token_store import write_store
from moe_train.training.batches import BatchPlan, SampleReader, StepBatches
from moe_train.training.loader import BatchLoader

CPU = torch.device("cpu")


@pytest.fixture
def reader(tmp_path: Path) -> SampleReader:
    """Steps of 6 samples in 2 microbatches, of 40 sequences of 64 tokens."""
    tokens = np.random.default_rng(0).integers(1, 50, size=64 * 40 + 1)
    write_store(tmp_path / "tokens.bin", [tokens], vocab_size=64)
    split = open_split(tmp_path / "tokens.bin", "stream", SequenceForm(length=64, pad_token_id=0))
    joined = JoinedSplit(names=("a",), splits=(split,), order=Mixture([1]))
    return SampleReader(joined, identity(), plan())


def identity() -> DataIdentity:
    share = SourceShare(name="a", weight="1.0", num_sequences=40)
    return DataIdentity(fingerprint="f", sequence_length=64, seed=1, sources=(share,))


def plan() -> BatchPlan:
    return BatchPlan(global_batch_size=6, num_microbatches=2, sample_rank=0, num_sample_ranks=1)


def same(one: StepBatches, other: StepBatches) -> bool:
    return one.read == other.read and all(
        torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu())
        for a, b in zip(one.batches, other.batches, strict=True)
        for name in ("input_ids", "labels", "position_ids")
    )


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_batches_that_are_made_ahead_are_those_of_the_step(
    reader: SampleReader, depth: int
) -> None:
    samples = range(0, 60, 6)
    with BatchLoader(reader, CPU, samples, depth=depth, timeout_s=10) as loader:
        for first in samples:
            assert same(loader.load(first), reader.read(first))


def test_a_stage_without_tokens_loads_nothing_the_same_way() -> None:
    reader = SampleReader(None, identity(), plan())
    with BatchLoader(reader, CPU, range(0, 60, 6), depth=2, timeout_s=10) as loader:
        assert [loader.load(first) for first in (0, 6)] == [StepBatches()] * 2


@pytest.mark.gpu
def test_batches_reach_the_device_whole_while_it_computes(reader: SampleReader) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    samples = range(0, 600, 6)
    size = 16 if torch.cuda.get_device_name() == "a fake device" else 2048
    weight = torch.randn(size, size, device=device)
    with BatchLoader(reader, device, samples, depth=3, timeout_s=30) as loader:
        for first in samples:
            step = loader.load(first)
            sums = [batch.input_ids.sum() for batch in step.batches]  # before the queue is empty
            for _ in range(4):
                weight = weight @ weight / weight.norm()
            expected = reader.read(first)
            assert all(batch.labels.device == device for batch in step.batches)
            assert same(step, expected)
            del step
            assert [int(s) for s in sums] == [int(b.input_ids.sum()) for b in expected.batches]

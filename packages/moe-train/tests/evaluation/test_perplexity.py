"""Figures over the whole set, the same on any number of ranks."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_train.config import ParallelConfig
from moe_train.data import JoinedSplit, TokenFiles
from moe_train.data.token_store import write_store
from moe_train.evaluation import measure_perplexity
from moe_train.evaluation.scoring import score_rows
from moe_train.generation import ModelOptions, open_model
from moe_train.parallel import join
from ranktest import run_ranks

LENGTHS = (5, 30, 1, 12, 25, 3, 17, 9)


@pytest.fixture
def split(tmp_path: Path) -> JoinedSplit:
    """Eight documents of 102 tokens, of which one has a single token."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(1, 300, length) for length in LENGTHS]
    write_store(tmp_path / "t.bin", documents, vocab_size=300)
    return TokenFiles((tmp_path / "t.bin",)).open(16, 0)


def test_every_token_but_a_documents_first_is_predicted_once(
    trained_run: Path, split: JoinedSplit
) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    figures = measure_perplexity(model, split, batch_size=3, num_bytes=400)
    nats = sum(
        float(score_rows(model, split.batch([n])).sum())  # type: ignore[union-attr]
        for n in range(split.num_sequences)
    )
    assert figures["tokens"] == sum(LENGTHS) - len(LENGTHS)
    assert figures["nats_per_token"] == pytest.approx(nats / figures["tokens"], rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["nats_per_token"]))
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / 400, rel=1e-6)


@pytest.mark.parametrize(("pp", "dp", "ep"), [(2, 1, 2), (1, 3, 1)])
def test_figures_are_those_of_one_process_in_every_layout(
    trained_run: Path, split: JoinedSplit, pp: int, dp: int, ep: int
) -> None:
    checkpoint = trained_run / "checkpoint-2"
    alone = open_model(checkpoint, ModelOptions(device="cpu"), None)
    expected = measure_perplexity(alone, split, batch_size=8)
    assert split.num_sequences % (dp * ep), "the last round has ranks with fewer rows"

    def on_rank(*_: Any) -> list[dict[str, float]]:
        parallel = ParallelConfig(pp=pp, dp=dp, ep=ep, timeout_s=60)
        options = ModelOptions(device="cpu", parallel=parallel)
        model = open_model(checkpoint, options, join(parallel, "cpu"))
        # The last rank gets no row of the second: as many rows as a round takes, less one.
        return [measure_perplexity(model, split, batch_size=size) for size in (1, 50)]

    for found in run_ranks(on_rank, pp * dp * ep):
        for figures in found:
            assert figures == pytest.approx(expected, rel=1e-6)
            assert figures["tokens"] == expected["tokens"]


def test_a_set_that_predicts_nothing_is_refused(trained_run: Path, tmp_path: Path) -> None:
    model = open_model(trained_run / "checkpoint-2", ModelOptions(device="cpu"), None)
    write_store(tmp_path / "one.bin", [np.array([4]), np.array([5])], vocab_size=300)
    with pytest.raises(ValueError, match="the data predict no token"):
        measure_perplexity(model, TokenFiles((tmp_path / "one.bin",)).open(8, 0))

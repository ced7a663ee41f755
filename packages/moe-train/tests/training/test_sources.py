from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe_train.config import Config
from moe_train.data import prepare
from moe_train.parallel import start
from moe_train.training.sources import open_corpus, open_splits
from ranktest import collect_ranks, run_ranks

Configure = Callable[..., Config]


def test_stages_without_tokens_know_the_corpus_and_its_order(configure: Configure) -> None:
    config = configure("parallel.pp=3", "train.seed=4", num_hidden_layers=3)
    prepared = prepare(config)
    train, validation = open_splits(config, prepared)

    def run(rank: int, _: int) -> object:
        parallel = start(config)
        corpus = open_corpus(config, parallel, None if rank == 1 else prepared)
        order = [part.tolist() for part in corpus.data.order().locate(np.arange(30))]
        return corpus.train is None, corpus.validation is None, corpus.facts, order

    first, middle, last = run_ranks(run, 3)  # type: ignore[misc]
    assert first[:2] == last[:2] == (False, False)
    assert middle[:2] == (True, True)
    assert first[2:] == middle[2:] == last[2:]
    facts = middle[2]
    assert facts.sources[0].num_sequences == train.num_sequences > 30
    assert facts.num_validation_sequences == validation.num_sequences
    assert facts.fingerprint == prepared.fingerprint


def test_a_rank_with_another_corpus_is_refused_by_its_number(
    configure: Configure, tmp_path: Path
) -> None:
    config = configure("parallel.dp=2")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.py", "b.py"):
        (other / name).write_text("import self\n" * 50)
    theirs = configure("parallel.dp=2", f"data.corpus={other}")
    corpora = [prepare(config), prepare(theirs)]
    outcomes = collect_ranks(
        lambda rank, _: open_corpus(config, start(config), corpora[rank]) and None, 2
    )
    assert outcomes[0].ok
    assert outcomes[1].error is not None
    said = outcomes[1].error.strip().splitlines()[-1]
    assert "rank 1 reads another corpus than rank 0: " in said
    assert all(prepared.fingerprint in said for prepared in corpora)
    assert said.endswith("give every machine the same files")


def test_the_splits_have_the_length_and_the_documents_of_the_job(configure: Configure) -> None:
    config = configure()
    train, validation = open_splits(config, prepare(config))
    assert train.num_sequences > validation.num_sequences > 1
    batch = train.batch(range(train.num_sequences))
    assert batch.input_ids.shape == (train.num_sequences, 12)
    ends = batch.input_ids == prepare(config).eos_token_id
    assert bool(ends.any()) and bool((batch.labels[ends] == -100).all())
    across = open_splits(configure("data.reset_at_documents=false"), prepare(config))[0]
    assert not bool((across.batch(range(train.num_sequences)).labels == -100).any())


def test_a_text_shorter_than_one_sequence_is_refused(configure: Configure) -> None:
    config = configure("data.sequence_length=60000", max_position_embeddings=60000)
    with pytest.raises(ValueError, match=r"^train.bin has \d+ tokens.*needs 60001; use more text"):
        open_splits(config, prepare(config))

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_train.data.joined import JoinedSplit, open_joined
from moe_train.data.mixture import Mixture
from moe_train.data.packing import SequenceForm, open_split
from moe_train.data.prepare import PreparedCorpus, PreparedSource
from moe_train.data.token_store import write_store


@pytest.fixture
def joined(tmp_path: Path) -> JoinedSplit:
    """Sources of 3, 9 and 6 sequences of 4 tokens, whose tokens say where they are."""
    form = SequenceForm(length=4, pad_token_id=0)
    splits = []
    for place, count in enumerate((3, 9, 6)):
        path = tmp_path / f"{place}.bin"
        documents = [np.full(4, 100 * place + number) for number in range(count)]
        write_store(path, documents, vocab_size=1000)
        splits.append(open_split(path, "pad", form))
    return JoinedSplit(names=("a", "b", "c"), splits=tuple(splits), order=Mixture([3, 9, 6]))


def test_a_batch_has_rows_of_several_sources_in_the_order_asked_for(joined: JoinedSplit) -> None:
    source, sequence = np.array([2, 0, 1, 2, 0]), np.array([5, 1, 8, 0, 1])
    batch = joined.rows(source, sequence)
    assert batch.input_ids[:, 0].tolist() == [205, 1, 108, 200, 1]
    assert batch.labels[:, 0].tolist() == [205, 1, 108, 200, 1]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 5
    assert joined.rows(source[:0], sequence[:0]).input_ids.shape == (0, 4)


def test_as_a_whole_each_sequence_has_one_number_and_the_first_stand_for_all(
    joined: JoinedSplit,
) -> None:
    ids = joined.batch(range(joined.num_sequences)).input_ids[:, 0].tolist()
    assert sorted(ids) == [*range(3), *range(100, 109), *range(200, 206)]
    assert sorted(place // 100 for place in ids[:6]) == [0, 1, 1, 1, 2, 2]
    for wrong in (18, -1):
        with pytest.raises(ValueError, match=rf"got {wrong}"):
            joined.batch([wrong])


def prepared(folder: Path, *sources: tuple[str, str, list[list[int]]]) -> PreparedCorpus:
    made = []
    for kind, packing, documents in sources:
        name = f"s{len(made)}"
        write_store(folder / f"{name}.bin", map(np.array, documents), vocab_size=100)
        made.append(
            PreparedSource(
                name=name,
                kind=kind,
                weight=1.0,
                packing=packing,
                train=folder / f"{name}.bin",
                validation=folder / f"{name}.bin",
                fingerprint="f",
            )
        )
    return PreparedCorpus(
        sources=tuple(made),
        tokenizer_file=folder / "tokenizer.json",
        vocab_size=100,
        eos_token_id=0,
        pad_token_id=9,
        fingerprint="f",
    )


def test_each_source_is_packed_in_its_way_and_says_what_is_cut(tmp_path: Path) -> None:
    documents = [[1] * 3, [2] * 9, [3] * 2]
    corpus = prepared(
        tmp_path,
        ("text", "stream", documents),
        ("text", "best_fit", documents),
        ("chat", "best_fit", documents),
        ("chat", "pad", documents),
    )
    train, validation = open_joined(corpus, sequence_length=5, reset_at_documents=True)
    assert train.describe() == [
        "source s0: 3 documents, 14 tokens in 2 sequences of 5 (stream)",
        "source s1: 3 documents, 14 tokens in 3 sequences of 5 (best_fit), 6.7% padding; 1 "
        "documents are longer and cut into pieces",
        "source s2: 3 documents, 14 tokens in 2 sequences of 5 (best_fit), 0.0% padding; 1 "
        "documents are longer than a sequence and lose their last 4 tokens: raise "
        "data.sequence_length to keep them",
        "source s3: 3 documents, 14 tokens in 3 sequences of 5 (pad), 33.3% padding; 1 "
        "documents are longer than a sequence and lose their last 4 tokens: raise "
        "data.sequence_length to keep them",
    ]
    assert validation.num_sequences == 10
    ids = train.splits[3].batch([0]).input_ids
    assert torch.equal(ids, torch.tensor([[1, 1, 1, 9, 9]]))


def test_pairs_are_not_trained_on(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, ("preference", "pad", [[1, 2]]))
    with pytest.raises(ValueError, match=r's0 has kind="preference".* train on text, chat, tokens'):
        open_joined(corpus, sequence_length=5, reset_at_documents=True)


def test_a_source_without_a_token_to_predict_is_refused_by_its_name(tmp_path: Path) -> None:
    documents = [np.arange(1, 9)] * 200
    corpus = prepared(
        tmp_path, ("chat", "best_fit", [[1, 2]]), ("chat", "pad", [[1]]), ("text", "pad", [[1]])
    )
    none, cut = np.zeros(8, np.uint8), np.array([0, 0, 0, 0, 0, 0, 1, 1], np.uint8)
    last = [*[none] * 199, np.ones(8, np.uint8)]
    for wrong in (none, cut):
        write_store(corpus.sources[1].train, documents, vocab_size=100, trained=[wrong] * 200)
        with pytest.raises(ValueError, match=r's1 has no .* train part: .* role "assistant"'):
            open_joined(corpus, sequence_length=5, reset_at_documents=True)
    write_store(corpus.sources[1].train, documents, vocab_size=100, trained=last)
    with pytest.raises(ValueError, match=r"source s2 has no token to predict"):
        open_joined(corpus, sequence_length=5, reset_at_documents=True)
    held = tmp_path / "held.bin"
    write_store(held, documents, vocab_size=100, trained=[none] * 200)
    other = replace(corpus.sources[1], validation=held)
    with pytest.raises(ValueError, match=r"source s1 has no token .* its validation part"):
        open_joined(replace(corpus, sources=(other,)), sequence_length=5, reset_at_documents=True)

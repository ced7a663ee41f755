from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_train.data.packing import IGNORED_LABEL, SequenceForm, Split, open_split
from moe_train.data.token_store import write_store

EOS = 0
PAD = 7000


def stream(path: Path, length: int, reset: bool) -> Split:
    form = SequenceForm(length=length, pad_token_id=PAD, reset_at_documents=reset)
    return open_split(path, "stream", form)


def write_documents(folder: Path, documents: list[list[int]]) -> Path:
    path = folder / "tokens.bin"
    parts = (np.array([*document, EOS], dtype=np.int64) for document in documents)
    write_store(path, parts, vocab_size=1000)
    return path


def reference(
    documents: list[list[int]], length: int, reset: bool
) -> list[tuple[list[int], list[int], list[int]]]:
    """Inputs, labels and positions of every sequence, token by token."""
    stream = [
        (token, number, place)
        for number, document in enumerate(documents)
        for place, token in enumerate([*document, EOS])
    ]
    sequences = []
    for first in range(0, len(stream) - length, length):
        inputs, labels, positions = [], [], []
        starts: dict[int, int] = {}
        for k in range(first, first + length):
            token, number, _ = stream[k]
            next_token, next_number, _ = stream[k + 1]
            starts.setdefault(number, k)
            inputs.append(token)
            labels.append(IGNORED_LABEL if reset and next_number != number else next_token)
            positions.append(k - starts[number] if reset else k - first)
        sequences.append((inputs, labels, positions))
    return sequences


documents_lists = st.lists(
    st.lists(st.integers(1, 999), max_size=12), min_size=1, max_size=12
).filter(lambda documents: sum(len(d) + 1 for d in documents) >= 2)


@settings(max_examples=150, deadline=None)
@given(documents=documents_lists, length=st.integers(1, 9), reset=st.booleans())
def test_sequences_equal_a_brute_force_reference(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    length: int,
    reset: bool,
) -> None:
    path = write_documents(tmp_path_factory.mktemp("split"), documents)
    expected = reference(documents, length, reset)
    if not expected:
        with pytest.raises(ValueError, match="needs"):
            stream(path, length, reset)
        return
    split = stream(path, length, reset)
    assert split.num_sequences == len(expected)
    batch = split.batch(range(len(expected)))
    for part, found in enumerate((batch.input_ids, batch.labels, batch.position_ids)):
        assert found.dtype == torch.int64
        assert found.tolist() == [sequence[part] for sequence in expected]


def test_batch_keeps_the_order_asked_for_and_may_repeat_or_be_empty(tmp_path: Path) -> None:
    split = stream(write_documents(tmp_path, [list(range(1, 21))]), 4, True)
    batch = split.batch([3, 0, 3])
    assert batch.input_ids[:, 0].tolist() == [13, 1, 13]
    empty = split.batch([])
    assert empty.input_ids.shape == empty.labels.shape == empty.position_ids.shape == (0, 4)


def test_batch_is_the_callers_to_change(tmp_path: Path) -> None:
    split = stream(write_documents(tmp_path, [list(range(1, 21))]), 4, False)
    first = split.batch([0, 1])
    for tensor in (first.input_ids, first.labels, first.position_ids):
        tensor.fill_(-5)
    assert split.batch([0]).input_ids.tolist() == [[1, 2, 3, 4]]
    assert split.batch([0, 1]).position_ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("numbers", [[-1], [0, 5], [10**9]])
def test_number_outside_of_the_split_is_refused(tmp_path: Path, numbers: list[int]) -> None:
    split = stream(write_documents(tmp_path, [list(range(1, 21))]), 4, True)
    assert split.num_sequences == 5
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        split.batch(numbers)


@pytest.mark.parametrize("documents", [[], [[1, 2, 3]]])
def test_split_below_one_sequence_is_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    path = write_documents(tmp_path, documents)
    with pytest.raises(ValueError, match=r"sequence_length=4 needs 5; use more text"):
        stream(path, 4, True)


def test_sequence_length_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_length=0"):
        stream(write_documents(tmp_path, [[1, 2]]), 0, True)


Row = tuple[list[int], list[int], list[int]]


def reference_piece(
    document: list[int], mask: list[int], first: int, length: int, truncate: bool
) -> Row:
    """Inputs, labels and positions of one piece of a document, without padding."""
    part = document[first : first + length]
    after = document[first + 1 : first + length + 1]
    if truncate:
        after = after[: length - 1]
    trained = mask[first + 1 : first + 1 + len(after)]
    labels = [token if t else IGNORED_LABEL for token, t in zip(after, trained, strict=True)]
    labels += [IGNORED_LABEL] * (len(part) - len(labels))
    return part, labels, list(range(len(part)))


def rows_of(split: Split) -> list[Row]:
    batch = split.batch(range(split.num_sequences))
    parts = (batch.input_ids, batch.labels, batch.position_ids)
    return [tuple(part[i].tolist() for part in parts) for i in range(split.num_sequences)]  # type: ignore[misc]


def without_padding(row: Row) -> list[Row]:
    """The pieces of a row; checks that the rest is padding."""
    inputs, labels, positions = row
    used = positions.index(-1) if -1 in positions else len(positions)
    assert inputs[used:] == [PAD] * (len(inputs) - used)
    assert labels[used:] == [IGNORED_LABEL] * (len(inputs) - used)
    assert positions[used:] == [-1] * (len(inputs) - used)
    begins = [i for i in range(used) if positions[i] == 0]
    ends = [*begins[1:], used]
    return [(inputs[a:b], labels[a:b], positions[a:b]) for a, b in zip(begins, ends, strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.tuples(st.integers(1, 999), st.booleans()), min_size=1, max_size=20),
        min_size=1,
        max_size=12,
    ),
    length=st.integers(1, 9),
    packing=st.sampled_from(["best_fit", "pad"]),
    truncate=st.booleans(),
)
def test_whole_documents_equal_a_brute_force_reference(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[tuple[int, bool]]],
    length: int,
    packing: str,
    truncate: bool,
) -> None:
    path = tmp_path_factory.mktemp("split") / "tokens.bin"
    tokens = [[token for token, _ in document] for document in documents]
    masks = [[int(trained) for _, trained in document] for document in documents]
    write_store(path, map(np.array, tokens), vocab_size=1000, trained=map(np.array, masks))
    form = SequenceForm(length=length, pad_token_id=PAD, truncate=truncate)
    split = open_split(path, packing, form)
    rows = rows_of(split)
    found = [piece for row in rows for piece in without_padding(row)]
    expected = [
        reference_piece(ids, mask, first, length, truncate)
        for ids, mask in zip(tokens, masks, strict=True)
        for first in range(0, 1 if truncate else len(ids), length)
    ]
    assert sorted(found) == sorted(expected)
    if packing == "pad":
        assert found == expected and len(rows) == len(expected)
    assert split.padding_tokens == sum(row[2].count(-1) for row in rows)
    assert split.cut_documents == sum(len(ids) > length for ids in tokens)
    lost = sum(max(0, len(ids) - length) for ids in tokens)
    assert split.dropped_tokens == (lost if truncate else 0)


def test_a_stream_predicts_targets_of_the_same_document_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    documents, masks = [[1, 2, 3, 4], [5, 6, 7]], [[0, 1, 0, 1], [1, 1, 0]]
    write_store(path, map(np.array, documents), vocab_size=9, trained=map(np.array, masks))
    batch = stream(path, 3, True).batch([0, 1])
    assert batch.labels.tolist() == [[2, -100, 4], [-100, 6, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 1]]
    across = stream(path, 3, False).batch([0, 1])
    assert across.labels.tolist() == [[2, -100, 4], [5, 6, -100]]


def test_documents_that_attend_to_each_other_are_not_put_together(tmp_path: Path) -> None:
    path = write_documents(tmp_path, [[1, 2, 3]])
    form = SequenceForm(length=4, pad_token_id=PAD, reset_at_documents=False)
    with pytest.raises(ValueError, match=r"set data.reset_at_documents=true"):
        open_split(path, "best_fit", form)
    assert open_split(path, "pad", form).num_sequences == 1


def test_a_file_of_empty_documents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_store(path, [np.array([], dtype=np.int64)], vocab_size=9)
    with pytest.raises(ValueError, match="no document with a token"):
        open_split(path, "pad", SequenceForm(length=4, pad_token_id=PAD))

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_train.data.packing import IGNORED_LABEL, PackedSplit
from moe_train.data.token_store import write_store

EOS = 0


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
            PackedSplit(path, length, EOS, reset)
        return
    split = PackedSplit(path, length, EOS, reset)
    assert split.num_sequences == len(expected)
    batch = split.batch(range(len(expected)))
    for part, found in enumerate((batch.input_ids, batch.labels, batch.position_ids)):
        assert found.dtype == torch.int64
        assert found.tolist() == [sequence[part] for sequence in expected]


def test_batch_keeps_the_order_asked_for_and_may_repeat_or_be_empty(tmp_path: Path) -> None:
    split = PackedSplit(write_documents(tmp_path, [list(range(1, 21))]), 4, EOS, True)
    batch = split.batch([3, 0, 3])
    assert batch.input_ids[:, 0].tolist() == [13, 1, 13]
    empty = split.batch([])
    assert empty.input_ids.shape == empty.labels.shape == empty.position_ids.shape == (0, 4)


def test_batch_is_the_callers_to_change(tmp_path: Path) -> None:
    split = PackedSplit(write_documents(tmp_path, [list(range(1, 21))]), 4, EOS, False)
    first = split.batch([0, 1])
    for tensor in (first.input_ids, first.labels, first.position_ids):
        tensor.fill_(-5)
    assert split.batch([0]).input_ids.tolist() == [[1, 2, 3, 4]]
    assert split.batch([0, 1]).position_ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("numbers", [[-1], [0, 5], [10**9]])
def test_number_outside_of_the_split_is_refused(tmp_path: Path, numbers: list[int]) -> None:
    split = PackedSplit(write_documents(tmp_path, [list(range(1, 21))]), 4, EOS, True)
    assert split.num_sequences == 5
    with pytest.raises(ValueError, match=r"must be in \[0, 5\)"):
        split.batch(numbers)


@pytest.mark.parametrize("documents", [[], [[1, 2, 3]]])
def test_split_below_one_sequence_is_refused(tmp_path: Path, documents: list[list[int]]) -> None:
    path = write_documents(tmp_path, documents)
    with pytest.raises(ValueError, match=r"sequence_length=4 needs 5; use more text"):
        PackedSplit(path, 4, EOS, True)


def test_sequence_length_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_length=0"):
        PackedSplit(write_documents(tmp_path, [[1, 2]]), 0, EOS, True)

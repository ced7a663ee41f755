import pytest
import torch

from moe_train.model.documents import added_mask, document_lengths, read_documents, token_places

PADDED = torch.tensor([[0, 1, 2, 0, 1, -1, -1], [-1, -1, 0, 1, 2, 3, 4], [-1] * 7])


def test_the_mask_is_causal_inside_each_document_only() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    mask = read_documents(positions).mask(None)
    assert mask is not None
    documents = [[0, 0, 0, 1, 1, 2], [0] * 6]
    for b in range(2):
        for i in range(6):
            for j in range(6):
                allowed = j <= i and documents[b][i] == documents[b][j]
                assert bool(mask[b, 0, i, j]) == allowed, (b, i, j)


def test_sequences_of_one_document_need_no_mask() -> None:
    assert read_documents(torch.arange(5).expand(3, 5)).mask(None) is None


def test_a_window_is_the_token_itself_and_those_before_it() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    for window in range(1, 9):
        mask = read_documents(positions).mask(window)
        documents = [[0] * 5 + [1] * 2, [0] * 7]
        assert mask is not None
        for b, row in enumerate(documents):
            for i in range(7):
                seen = [j for j in range(7) if bool(mask[b, 0, i, j])]
                assert seen == [j for j in range(i + 1) if row[i] == row[j] and i - j < window]
    assert read_documents(positions[1:]).mask(7) is None


@pytest.mark.parametrize("window", [None, 2])
def test_padding_attends_to_itself_and_no_token_to_padding(window: int | None) -> None:
    documents = [[0, 0, 0, 1, 1, None, None], [None, None, 0, 0, 0, 0, 0], [None] * 7]
    mask = read_documents(PADDED).mask(window)
    assert mask is not None
    for b, row in enumerate(documents):
        for i in range(7):
            expected = [i]
            if row[i] is not None:
                near = range(0 if window is None else max(0, i - window + 1), i + 1)
                expected = [j for j in near if row[j] == row[i]]
            assert [j for j in range(7) if bool(mask[b, 0, i, j])] == expected, (b, i)


def test_padding_behind_single_documents_takes_the_causal_path() -> None:
    documents = read_documents(torch.tensor([[0, 1, 2, -1], [0, -1, -1, -1], [-1] * 4]))
    assert documents.mask(None) is None
    assert documents.token_idx_N is not None
    assert documents.token_idx_N.tolist() == [0, 1, 2, 4]


def test_places_of_tokens_are_none_without_padding() -> None:
    assert read_documents(torch.arange(5)[None]).token_idx_N is None
    assert token_places(PADDED).tolist() == [0, 1, 2, 3, 4, 9, 10, 11, 12, 13]


def test_a_document_is_as_long_as_the_row_holds_it() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, -1, -1], [7, 8, 0, 1, 2, 3, 4], [-1] * 7])
    assert document_lengths(positions).tolist() == [
        [3, 3, 3, 2, 2, 0, 0],
        [9, 9, 5, 5, 5, 5, 5],
        [0] * 7,
    ]


def test_what_is_added_to_scores_allows_the_same() -> None:
    mask = read_documents(PADDED).mask(2)
    assert mask is not None and added_mask(None, torch.float32) is None
    added = added_mask(mask, torch.bfloat16)
    assert added is not None and added.dtype == torch.bfloat16 and added.shape == mask.shape
    assert torch.equal(added == 0, mask) and torch.equal(added == -torch.inf, ~mask)

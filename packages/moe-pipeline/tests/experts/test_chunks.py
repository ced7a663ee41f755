import torch
from torch.testing import assert_close

from moe_pipeline.experts.chunks import Permutation, expert_chunks, max_rows


def test_chunks_cover_every_row_once_and_keep_to_the_limit():
    counts = (5, 0, 3, 9, 1, 1, 0, 2)
    chunks = list(expert_chunks(counts, 6))
    assert [chunk.start for chunk in chunks[1:]] == [chunk.end for chunk in chunks[:-1]]
    assert (chunks[0].start, chunks[-1].end) == (0, sum(counts))
    experts = [pair for chunk in chunks for pair in zip(chunk.experts, chunk.counts, strict=True)]
    assert experts == [(expert, count) for expert, count in enumerate(counts) if count]
    for chunk in chunks:
        assert chunk.end - chunk.start == sum(chunk.counts)
        assert chunk.end - chunk.start <= 6 or len(chunk.experts) == 1
    assert list(expert_chunks((0, 0), 6)) == []


def test_the_permutation_brings_tokens_to_rows_and_sums_rows_of_a_token(seed):
    # Tokens 0 .. 2 with two choices each; choice 3 goes nowhere, experts have 3, 0 and 2 rows.
    order_R = torch.tensor([0, 4, 2, 1, 5])
    permutation = Permutation.of(order_R, 3, 2)
    x_TD = torch.randn(3, 4, dtype=torch.float64)
    (chunk,) = expert_chunks((3, 0, 2), 10)
    assert_close(permutation.permute(chunk, x_TD), x_TD[[0, 2, 1, 0, 2]])
    rows = permutation.new_rows(x_TD, 5)
    rows[:5] = torch.randn(5, 4, dtype=torch.float64)
    expected = torch.stack([rows[0] + rows[3], rows[2], rows[1] + rows[4]])
    assert_close(permutation.unpermute(rows), expected)


def test_without_an_order_rows_stay_rows(seed):
    permutation, rows = Permutation.of(None, 5, 0), torch.randn(5, 4)
    (chunk,) = expert_chunks((5,), 10)
    assert permutation.permute(chunk, rows).data_ptr() == rows.data_ptr()
    assert permutation.unpermute(rows) is rows


def test_a_chunk_has_at_least_one_row():
    assert max_rows(torch.empty(0, 4), 1 << 40) == 1
    assert max_rows(torch.empty(0, 4), 1 << 10) == 1 << 11

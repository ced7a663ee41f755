import torch
from torch.testing import assert_close

from moe_pipeline.experts.chunks import Way, max_rows
from moe_pipeline.experts.chunks import blocks as blocks_of


def test_blocks_cover_every_row_once_and_keep_to_the_limit():
    counts = (5, 0, 3, 9, 1, 1, 0, 2)
    blocks = list(blocks_of(counts, 6))
    assert [block.start for block in blocks[1:]] == [block.end for block in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].end) == (0, sum(counts))
    experts = [pair for block in blocks for pair in zip(block.experts, block.counts, strict=True)]
    assert experts == [(expert, count) for expert, count in enumerate(counts) if count]
    for block in blocks:
        assert block.end - block.start == sum(block.counts)
        assert block.end - block.start <= 6 or len(block.experts) == 1
    assert list(blocks_of((0, 0), 6)) == []


def test_the_way_brings_tokens_to_rows_and_sums_rows_of_a_token(seed):
    # Tokens 0 .. 2 with two choices each; choice 3 goes nowhere, experts have 3, 0 and 2 rows.
    order_R = torch.tensor([0, 4, 2, 1, 5])
    way = Way.of(order_R, 3, 2)
    x_TD = torch.randn(3, 4, dtype=torch.float64)
    (block,) = blocks_of((3, 0, 2), 10)
    assert_close(way.rows(block, x_TD), x_TD[[0, 2, 1, 0, 2]])
    rows = way.new_rows(x_TD, 5)
    rows[:5] = torch.randn(5, 4, dtype=torch.float64)
    expected = torch.stack([rows[0] + rows[3], rows[2], rows[1] + rows[4]])
    assert_close(way.back(rows), expected)


def test_without_an_order_rows_stay_rows(seed):
    way, rows = Way.of(None, 5, 0), torch.randn(5, 4)
    (block,) = blocks_of((5,), 10)
    assert way.rows(block, rows).data_ptr() == rows.data_ptr()
    assert way.back(rows) is rows


def test_a_block_has_at_least_one_row():
    assert max_rows(torch.empty(0, 4), 1 << 40) == 1
    assert max_rows(torch.empty(0, 4), 1 << 10) == 1 << 11

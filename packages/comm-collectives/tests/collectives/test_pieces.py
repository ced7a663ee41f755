"""The transfers under gathers and reductions, among real ranks."""

import torch

from comm_collectives.call.calls import Call
from comm_collectives.call.groups.groups import group_state
from comm_collectives.collectives.pieces import (
    even_splits,
    exchange_pieces,
    gather_rows,
    return_pieces,
)
from ranktest import run_ranks


def test_even_splits_differ_by_one_at_most() -> None:
    assert even_splits(7, 3) == (3, 2, 2)
    assert even_splits(2, 3) == (1, 1, 0)
    assert even_splits(0, 2) == (0, 0)


def test_rows_are_gathered_whether_even_padded_or_one_by_one() -> None:
    """Equal counts, counts that differ a little, and counts that differ much."""

    def fn(rank: int, world_size: int) -> None:
        for counts in ([4, 4, 4], [10, 10, 9], [40, 0, 1], [0, 0, 0]):
            call = Call(group_state(None), "test")
            own = torch.full((counts[rank], 2), rank, dtype=torch.int16)
            want = torch.cat([torch.full((n, 2), r) for r, n in enumerate(counts)]).short()
            assert torch.equal(gather_rows(call, own, counts), want)

    run_ranks(fn, 3)


def test_pieces_come_back_as_they_were() -> None:
    def fn(rank: int, world_size: int) -> None:
        for splits in ([2, 3, 1], [0, 6, 0]):
            call = Call(group_state(None), "test")
            x = torch.arange(12.0).view(6, 2) + 100 * rank
            _, rows = exchange_pieces(call, x, splits)
            assert rows.shape == (world_size, splits[rank], 2)
            start = sum(splits[:rank])
            for src, row in enumerate(rows):
                want = torch.arange(12.0).view(6, 2)[start : start + splits[rank]] + 100 * src
                assert torch.equal(row, want)
            assert torch.equal(return_pieces(call, rows, splits), x)

    run_ranks(fn, 3)

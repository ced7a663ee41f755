import pytest
import torch

from moe_train.model.parallel import WHOLE, PositionCut


@pytest.mark.parametrize(
    ("size", "length", "lengths"),
    [(2, 5, (3, 2)), (3, 9, (3, 3, 3)), (4, 2, (1, 1, 0, 0)), (2, 0, (0, 0))],
)
def test_ranks_have_runs_that_make_up_the_sample(
    size: int, length: int, lengths: tuple[int, ...]
) -> None:
    x = torch.arange(3 * length * 2).view(3, length, 2)
    cuts = [PositionCut(rank=rank, size=size) for rank in range(size)]
    assert {cut.lengths(length) for cut in cuts} == {lengths}
    parts = [cut.take(x) for cut in cuts]
    assert [part.shape[1] for part in parts] == list(lengths)
    assert torch.equal(torch.cat(parts, dim=1), x)


@pytest.mark.parametrize(
    ("size", "length", "own"),
    [
        (2, 7, [[0, 1, 6], [2, 3, 4, 5]]),
        (3, 6, [[0, 5], [1, 4], [2, 3]]),
        (3, 2, [[0], [1], []]),
        (1, 3, [[0, 1, 2]]),
    ],
)
def test_folded_a_rank_has_tokens_that_attend_to_few_and_to_many(
    size: int, length: int, own: list[list[int]]
) -> None:
    cuts = [PositionCut(rank=rank, size=size, is_folded=True) for rank in range(size)]
    x = torch.arange(length).expand(2, length)
    assert [cut.take(x)[1].tolist() for cut in cuts] == own
    assert {cut.lengths(length) for cut in cuts} == {tuple(map(len, own))}


def test_a_rank_without_others_has_all() -> None:
    x = torch.randn(2, 5)
    assert torch.equal(WHOLE.take(x), x)


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_cut_within_another_one_takes_its_part_of_the_positions_in_order(is_folded: bool) -> None:
    for length in (0, 1, 5, 13):
        positions = torch.arange(length)[None]
        for rank in range(3):
            outer = PositionCut(rank=rank, size=3, is_folded=is_folded)
            parts = [PositionCut(rank=r, size=2, within=outer) for r in range(2)]
            own = [part.take(positions) for part in parts]
            assert torch.equal(torch.cat(own, dim=1), outer.take(positions))
            assert parts[0].lengths(length) == tuple(x.shape[1] for x in own)
            assert own[0].shape[1] - own[1].shape[1] in (0, 1)
            assert parts[1].outer == outer and outer.outer == outer

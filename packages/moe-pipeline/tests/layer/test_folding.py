import pytest

from moe_pipeline.layer.folding import fold_experts


def test_every_rank_is_once_on_every_axis():
    for ep_size, etp_size in [(1, 1), (2, 1), (1, 2), (3, 2), (2, 6), (12, 1)]:
        axes = fold_experts(range(12), ep_size=ep_size, etp_size=etp_size)
        sizes = ep_size, etp_size, 12 // (ep_size * etp_size)
        for groups, size in zip((axes.ep, axes.etp, axes.expert_dp), sizes, strict=True):
            assert sorted(rank for group in groups for rank in group) == list(range(12))
            assert {len(group) for group in groups} == {size}


def test_ranks_of_an_expert_dp_group_have_the_same_place_on_ep_and_etp():
    axes = fold_experts(range(24), ep_size=3, etp_size=2)
    for group in axes.expert_dp:
        places = {
            (ep.index(rank), etp.index(rank))
            for rank in group
            for ep in axes.ep
            for etp in axes.etp
            if rank in ep and rank in etp
        }
        assert len(places) == 1


def test_the_order_of_the_ranks_decides_who_are_neighbours():
    axes = fold_experts([0, 2, 1, 3], ep_size=2)
    assert axes.ep == ((0, 2), (1, 3))
    assert axes.expert_dp == ((0, 1), (2, 3))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ep_size=3 x etp_size=2 = 6 does not divide the 4 ranks"):
        fold_experts(range(4), ep_size=3, etp_size=2)
    with pytest.raises(ValueError, match="must be at least 1"):
        fold_experts(range(4), ep_size=0)
    with pytest.raises(TypeError, match="etp_size must be an int"):
        fold_experts(range(4), etp_size=2.0)
    with pytest.raises(ValueError, match="a rank twice"):
        fold_experts([0, 1, 1, 2])


@pytest.mark.parametrize(
    ("order", "ep_size", "etp_size", "words"),
    [
        ((3, 1, 0, 2), 1, 2, "etp group [3, 1]"),
        ((1, 0, 2, 3), 2, 1, "ep group [1, 0]"),
        ((0, 3, 2, 1), 2, 2, "ep group [3, 1]"),
    ],
)
def test_orders_that_process_groups_cannot_have_are_refused(order, ep_size, etp_size, words):
    with pytest.raises(ValueError, match="ascending order") as caught:
        fold_experts(order, ep_size=ep_size, etp_size=etp_size)
    assert f"ranks={list(order)} lays the {words}" in str(caught.value)


def test_orders_whose_groups_ascend_are_taken():
    axes = fold_experts((2, 3, 0, 1), ep_size=2)
    assert axes.ep == ((2, 3), (0, 1)) and axes.expert_dp == ((2, 0), (3, 1))

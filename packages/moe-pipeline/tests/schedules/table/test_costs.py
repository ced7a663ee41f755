import pytest

from moe_pipeline.schedules.table.costs import StageCosts, costs_of_stages


def test_one_stands_for_all():
    assert costs_of_stages(StageCosts(), 3) == (StageCosts(),) * 3


def test_another_number_of_stages_is_refused():
    with pytest.raises(ValueError, match="expected costs of 3 stages, got 2"):
        costs_of_stages([StageCosts()] * 2, 3)
    with pytest.raises(TypeError, match=r"costs\[1\] must be a StageCosts, got a int"):
        costs_of_stages([StageCosts(), 1], 2)


def test_all_of_an_activation_is_left_to_w_unless_said():
    assert StageCosts(activation_bytes=7).left_for_weights == 7
    assert StageCosts(activation_bytes=7, weight_gradient_bytes=0).left_for_weights == 0


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_numbers_that_are_no_cost_are_refused(bad):
    with pytest.raises(ValueError, match="forward_s must be finite and not negative"):
        StageCosts(forward_s=bad)


def test_w_cannot_keep_more_than_there_was():
    with pytest.raises(ValueError, match="weight_gradient_bytes=8 exceeds activation_bytes=7"):
        StageCosts(activation_bytes=7, weight_gradient_bytes=8)

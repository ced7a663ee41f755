import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import RouterOptions
from moe_pipeline.scoring import SCORE_FUNCTIONS


@pytest.mark.parametrize("name", sorted(SCORE_FUNCTIONS))
def test_a_rule_keeps_the_order_of_logits_and_its_probs_are_its_scores_over_their_sum(seed, name):
    logits = torch.randn(20, 6, dtype=torch.float64)
    scores = SCORE_FUNCTIONS[name].scores(logits)
    probs = SCORE_FUNCTIONS[name].probs(logits, scores)
    assert (scores >= 0).all() and torch.equal(scores.argsort(1), logits.argsort(1))
    assert_close(probs, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("name", sorted(SCORE_FUNCTIONS))
def test_probs_are_finite_where_all_scores_vanish(name):
    logits = torch.full((2, 4), -1000.0)
    probs = SCORE_FUNCTIONS[name].probs(logits, SCORE_FUNCTIONS[name].scores(logits))
    assert_close(probs, torch.full((2, 4), 0.25))


def test_options_know_the_rules_of_the_table():
    for name in SCORE_FUNCTIONS:
        assert RouterOptions(moe_router_score_function=name).moe_router_score_function == name
    with pytest.raises(ValueError, match="'tanh' is unknown; choose one of softmax, sigmoid"):
        RouterOptions(moe_router_score_function="tanh")

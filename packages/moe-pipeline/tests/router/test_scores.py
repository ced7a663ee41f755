import math

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import RouterOptions
from moe_pipeline.router.scores import chosen_weights, expert_scores

RULES = {
    "softmax": dict(norm_topk_prob=False),
    "softmax, normalised": dict(),
    "softmax, scaled": dict(norm_topk_prob=False, routed_scaling_factor=2.5),
    "softmax after the choice": dict(moe_router_pre_softmax=False, norm_topk_prob=False),
    "sigmoid": dict(moe_router_score_function="sigmoid", norm_topk_prob=False),
    "sigmoid, normalised and scaled": dict(
        moe_router_score_function="sigmoid", routed_scaling_factor=2.5
    ),
    "softmax, normalised by at least 0.9": dict(moe_norm_min=0.9),
}


def weights_by_hand(logits, chosen, options):
    """The weights of one token's chosen experts, -1 for none, in Python's numbers."""
    if options.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    elif options.moe_router_pre_softmax:
        scores = [math.exp(value) / sum(map(math.exp, logits)) for value in logits]
    else:
        total = sum(math.exp(logits[e]) for e in chosen if e >= 0)
        scores = [math.exp(value) / total if total else 0.0 for value in logits]
    weights = [scores[e] if e >= 0 else 0.0 for e in chosen]
    if options.norm_topk_prob:
        total = max(sum(weights), options.moe_norm_min)
        weights = [value / total for value in weights]
    return [value * options.routed_scaling_factor for value in weights]


def weights_of(logits, idx, options):
    scores, _ = expert_scores(logits, options)
    return chosen_weights(logits, scores, idx, options)


def some_choices():
    """Choices of 5 among 7 experts; some are missing, for one token all."""
    idx = torch.rand(20, 7).argsort()[:, :5]
    idx[torch.rand(20, 5) < 0.3] = -1
    idx[3] = -1
    return idx


@pytest.mark.parametrize("rule", RULES)
def test_weights_equal_those_by_hand(seed, rule):
    options = RouterOptions(**RULES[rule])
    logits, idx = torch.randn(20, 7, dtype=torch.float64) * 3, some_choices()
    expected = [
        weights_by_hand(row, chosen, options)
        for row, chosen in zip(logits.tolist(), idx.tolist(), strict=True)
    ]
    got = weights_of(logits, idx, options)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=1e-13, rtol=1e-13)
    assert (got[idx < 0] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_weights_and_probabilities_are_right(seed, rule):
    options = RouterOptions(**RULES[rule])
    idx = some_choices()[:5]
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: weights_of(x, idx, options), (logits,))
    assert torch.autograd.gradcheck(lambda x: expert_scores(x, options)[1], (logits,))


@pytest.mark.parametrize("rule", RULES)
def test_tokens_without_any_expert_give_zeros_and_zero_gradients(seed, rule):
    options = RouterOptions(**RULES[rule])
    logits = torch.randn(4, 7, requires_grad=True)
    weights = weights_of(logits, torch.full((4, 3), -1), options)
    weights.sum().backward()
    assert not weights.any()
    assert not logits.grad.any()


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
def test_probabilities_sum_to_one_and_are_proportional_to_scores(seed, function, shift):
    options = RouterOptions(moe_router_score_function=function)
    logits = (torch.randn(30, 9) + shift).requires_grad_()
    _, probs = expert_scores(logits, options)
    assert_close(probs.sum(1), torch.ones(30))
    exact, _ = expert_scores(logits.detach().double(), options)
    assert_close(probs.double(), exact / exact.sum(1, keepdim=True), atol=1e-6, rtol=1e-5)
    probs.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_vanishing_scores_give_finite_weights_and_gradients():
    options = RouterOptions(moe_router_score_function="sigmoid", moe_norm_min=0.0)
    logits = torch.full((2, 5), -500.0, requires_grad=True)
    weights = weights_of(logits, torch.tensor([[0, 1], [2, 3]]), options)
    weights.sum().backward()
    assert weights.isfinite().all()
    assert logits.grad.isfinite().all()


def test_no_tokens_and_no_choices_are_fine():
    options = RouterOptions()
    assert weights_of(torch.empty(0, 7), torch.empty(0, 2, dtype=torch.int64), options).numel() == 0
    assert weights_of(torch.randn(3, 7), torch.empty(3, 0, dtype=torch.int64), options).numel() == 0

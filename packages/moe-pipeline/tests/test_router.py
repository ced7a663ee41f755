import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig
from moe_pipeline.router import TopKRouter, topk_lowest_index_first


def make(experts=8, k=2, hidden=16, dtype=None, **kwargs):
    config = MoEConfig(
        hidden_size=hidden,
        moe_intermediate_size=8,
        num_experts=experts,
        num_experts_per_tok=k,
        initializer_range=0.5,
        **kwargs,
    )
    return TopKRouter(config, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [True, False])
def test_router_equals_softmax_then_topk(seed, dtype, norm):
    router = make(experts=60, k=8, dtype=dtype, norm_topk_prob=norm)
    x = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    routed = router(x)
    probs = torch.softmax(x @ router.weight.t(), dim=-1)
    weights, idx = probs.topk(8, dim=-1)
    if norm:
        weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(routed.plan.topk_idx_TK, idx)
    assert_close(routed.topk_weights_TK, weights)
    assert_close(routed.probs_TE, probs)
    assert torch.equal(routed.plan.counts_E, torch.bincount(idx.flatten(), minlength=60))
    factors = torch.randn_like(weights)
    ours = torch.autograd.grad((routed.topk_weights_TK * factors).sum(), [x, router.weight])
    theirs = torch.autograd.grad((weights * factors).sum(), [x, router.weight])
    assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_lower_index(seed, dtype):
    levels = torch.randint(0, 3, (200, 24)).to(dtype) / 3
    got = topk_lowest_index_first(levels, 6)
    for row, idx in zip(levels.tolist(), got.tolist(), strict=True):
        assert idx == sorted(range(24), key=lambda e: (-row[e], e))[:6]


def test_a_token_without_preference_goes_to_the_first_experts():
    routed = make(experts=5, k=3)(torch.zeros(2, 16))
    assert routed.plan.topk_idx_TK.tolist() == [[0, 1, 2]] * 2


def test_choice_of_non_contiguous_scores_is_right(seed):
    scores = torch.rand(9, 7).t()
    assert torch.equal(topk_lowest_index_first(scores, 2), scores.topk(2).indices)


def test_router_scores_in_fp32_for_bf16_models(seed):
    router = make(dtype=torch.bfloat16)
    x = torch.randn(30, 16, dtype=torch.bfloat16)
    routed = router(x)
    assert routed.probs_TE.dtype == routed.topk_weights_TK.dtype == torch.float32
    assert_close(routed.probs_TE, torch.softmax(x.float() @ router.weight.float().t(), -1))


def test_autocast_does_not_lower_the_scores(seed):
    router, x = make(), torch.randn(30, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = router(x).probs_TE
    assert torch.equal(inside, router(x).probs_TE)


def test_no_tokens_is_fine():
    routed = make()(torch.empty(0, 16))
    assert routed.plan.topk_idx_TK.shape == (0, 2)
    assert routed.plan.counts_E.tolist() == [0] * 8
    routed.topk_weights_TK.sum().backward()


def test_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"\[tokens, hidden_size=16\], got shape \(3, 5\)"):
        make()(torch.empty(3, 5))

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.router.top_k import TopKRouter, rows_per_expert

SIGMOID = dict(moe_router_score_function="sigmoid")
TOP2 = dict(moe_router_group_score="top2_sum")
RULES = {
    "softmax": dict(norm_topk_prob=False),
    "softmax, normalised": dict(),
    "softmax after the choice, with bias": dict(
        moe_router_pre_softmax=False, norm_topk_prob=False, moe_router_bias=True
    ),
    "softmax in the best groups, scaled": dict(
        n_group=5, topk_group=2, norm_topk_prob=False, routed_scaling_factor=16.0
    ),
    "softmax with expert bias": dict(moe_router_enable_expert_bias=True, moe_norm_min=1e-12),
    "sigmoid with expert bias in the best groups": dict(
        **SIGMOID,
        **TOP2,
        n_group=6,
        topk_group=3,
        moe_router_enable_expert_bias=True,
        routed_scaling_factor=2.5,
    ),
    "sigmoid": dict(**SIGMOID, norm_topk_prob=False),
}


def make(experts=8, k=2, hidden=16, dtype=None, **router):
    config = MoEConfig(
        hidden_size=hidden,
        moe_intermediate_size=8,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(**router),
        initializer_range=0.5,
    )
    made = TopKRouter(config, dtype=dtype)
    with torch.no_grad():
        if made.bias is not None:
            made.bias.normal_()
        if config.router.moe_router_enable_expert_bias:
            made.e_score_correction_bias.normal_(std=0.1)
    return made


def mask_of_best_groups(by, options, topk):
    """By sorting tokens one at a time; the numbers here have no ties."""
    keep = torch.zeros_like(by, dtype=torch.bool)
    size = by.shape[1] // options.n_group
    for token, row in enumerate(by.detach()):
        groups = row.view(options.n_group, size).sort(descending=True).values
        score = groups[:, 0] if options.moe_router_group_score == "max" else groups[:, :2].sum(1)
        for group in score.sort(descending=True).indices[:topk].tolist():
            keep[token, group * size : (group + 1) * size] = True
    return keep


def scores_by_hand(router, x):
    """Logits, scores, and what the choice goes by, by plain autograd."""
    options = router.config.router
    logits = x @ router.weight.t()
    logits = logits if router.bias is None else logits + router.bias
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits))
    else:
        scores = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    by = scores if options.moe_router_pre_softmax else logits
    if options.moe_router_enable_expert_bias:
        by = by + router.e_score_correction_bias
    return logits, scores, by


def weights_by_hand(logits, scores, idx, options):
    weights = scores.gather(1, idx)
    if not options.moe_router_pre_softmax:
        weights = torch.exp(logits.gather(1, idx))
        weights = weights / weights.sum(1, keepdim=True)
    if options.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * options.routed_scaling_factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("k", "tokens"), [(1, 9), (3, 40), (8, 40)])
@pytest.mark.parametrize("rule", RULES)
def test_routing_equals_the_reference(seed, rule, k, tokens, dtype):
    router = make(experts=60, k=k, dtype=dtype, **RULES[rule])
    options = router.config.router
    x = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    routed = router(x)
    idx = routed.plan.topk_idx_TK
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    logits, scores, by = scores_by_hand(router, x)
    keep = mask_of_best_groups(by, options, options.topk_group)
    best = torch.where(keep, by, -torch.inf).sort(dim=1, descending=True).values[:, :k]
    # Rounding may swap neighbours, not what is chosen.
    assert_close(by.gather(1, idx), best, atol=limit, rtol=limit)
    assert all(len(set(row)) == k for row in idx.tolist())
    assert torch.equal(routed.plan.counts_E, torch.bincount(idx.flatten(), minlength=60))
    assert torch.equal(routed.plan.logits_TE, routed.logits_TE)
    assert routed.plan.undropped_idx_TK is None
    weights = weights_by_hand(logits, scores, idx, options)
    probs = scores / scores.sum(1, keepdim=True)
    assert_close(routed.topk_weights_TK, weights, atol=limit, rtol=limit)
    assert_close(routed.probs_TE, probs, atol=limit, rtol=limit)
    factors, others = torch.randn_like(weights), torch.randn_like(probs)
    inputs = [x, *router.parameters()]
    ours = (routed.topk_weights_TK * factors).sum() + (routed.probs_TE * others).sum()
    theirs = (weights * factors).sum() + (probs * others).sum()
    ours, theirs = (torch.autograd.grad(value, inputs) for value in (ours, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, atol=limit * 30, rtol=limit * 10)


def test_a_token_without_preference_goes_to_the_first_experts():
    routed = make(experts=5, k=3)(torch.zeros(2, 16))
    assert routed.plan.topk_idx_TK.tolist() == [[0, 1, 2]] * 2


def test_expert_bias_selects_and_is_never_in_the_weights(seed):
    router = make(experts=6, k=2, moe_router_enable_expert_bias=True, **SIGMOID)
    x = torch.randn(9, 16)
    router.e_score_correction_bias.copy_(torch.tensor([0, 0, 0, 0, 5.0, 5.0]))
    routed = router(x)
    assert (routed.plan.topk_idx_TK.sort(1).values == torch.tensor([4, 5])).all()
    scores = torch.sigmoid(x @ router.weight.t()).gather(1, routed.plan.topk_idx_TK)
    assert_close(routed.topk_weights_TK, scores / scores.sum(1, keepdim=True))


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


@pytest.mark.parametrize("rule", RULES)
def test_given_choices_and_logits_give_the_same_bits(seed, rule):
    router = make(experts=60, k=4, moe_expert_capacity_factor=0.7, **RULES[rule])
    x = torch.randn(50, 16)
    first = router(x)
    assert (first.plan.topk_idx_TK == -1).any()
    noisy = x + 1e-3 * torch.randn_like(x)
    again = router(noisy, topk_idx_TK=first.plan.topk_idx_TK, logits_TE=first.plan.logits_TE)
    assert torch.equal(again.plan.topk_idx_TK, first.plan.topk_idx_TK)
    for name in ("topk_weights_TK", "probs_TE", "logits_TE"):
        assert torch.equal(getattr(again, name), getattr(first, name))
    ours = torch.autograd.grad(again.topk_weights_TK.square().sum(), router.weight)[0]
    theirs = torch.autograd.grad(first.topk_weights_TK.square().sum(), router.weight)[0]
    assert_close(ours, theirs, atol=2e-2 * theirs.abs().max().item(), rtol=0)
    assert not torch.equal(ours, theirs)


def test_given_choices_are_weighted_by_the_routers_own_scores(seed):
    router, x = make(experts=5, k=2), torch.randn(4, 16)
    idx = torch.tensor([[3, 1], [-1, 2], [-1, -1], [0, 4]])
    routed = router(x, topk_idx_TK=idx)
    probs = torch.softmax(x @ router.weight.t(), 1)
    weights = probs.gather(1, idx.clamp(min=0)) * (idx >= 0)
    assert_close(routed.topk_weights_TK, weights / weights.sum(1, keepdim=True).clamp(min=1e-20))
    assert routed.plan.counts_E.tolist() == [1, 1, 1, 1, 1]
    assert routed.plan.topk_idx_TK is idx


def test_rows_per_expert_counts_no_missing_choice():
    idx = torch.tensor([[0, -1, 3], [3, -1, -1]])
    assert rows_per_expert(idx, 5).tolist() == [1, 0, 0, 2, 0]
    assert rows_per_expert(torch.empty(0, 3, dtype=torch.int64), 2).tolist() == [0, 0]


def test_no_tokens_is_fine():
    for rule in RULES.values():
        router = make(experts=60, k=3, **rule)
        routed = router(torch.empty(0, 16))
        assert routed.plan.topk_idx_TK.shape == (0, 3)
        assert routed.plan.counts_E.tolist() == [0] * 60
        routed.topk_weights_TK.sum().backward()
        assert not router.weight.grad.any()


def test_jitter_multiplies_the_input_by_numbers_that_belong_to_the_token(seed):
    eps, ids = 0.25, torch.tensor([5, 900, 6, 7])
    router, x = make(moe_input_jitter_eps=eps, dtype=torch.float64), torch.rand(4, 16).double()
    with torch.no_grad():
        router.weight.zero_()[:, :8] = torch.eye(8)  # logits are the input's first columns
    factors = router(x, token_ids_T=ids).logits_TE / x[:, :8]
    assert (factors - 1).abs().max() <= eps
    assert (factors - 1).abs().max() > eps / 2
    assert factors.unique().numel() == factors.numel()
    alone = router(x[2:3], token_ids_T=ids[2:3]).logits_TE / x[2:3, :8]
    assert torch.equal(alone, factors[2:3])
    router.noise_key = 1
    assert not torch.isclose(router(x, token_ids_T=ids).logits_TE / x[:, :8], factors).any()
    router.eval()
    assert torch.equal(router(x).logits_TE, x[:, :8])


def test_jitter_of_bf16_tokens_is_computed_in_fp32_and_differentiable(seed):
    router = make(moe_input_jitter_eps=0.1, dtype=torch.bfloat16)
    x = torch.randn(3, 16).bfloat16().requires_grad_()
    routed = router(x, token_ids_T=torch.arange(3))
    assert routed.logits_TE.dtype == torch.float32
    routed.logits_TE.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.any()


def test_names_and_dtypes_of_parameters_and_buffers():
    router = make(dtype=torch.bfloat16, moe_router_bias=True, moe_router_enable_expert_bias=True)
    state = {name: (tuple(t.shape), t.dtype) for name, t in router.state_dict().items()}
    assert state == {
        "weight": ((8, 16), torch.bfloat16),
        "bias": ((8,), torch.bfloat16),
        "e_score_correction_bias": ((8,), torch.float32),
    }
    assert set(make().state_dict()) == {"weight"}


def test_router_is_made_on_the_meta_device_and_initialised_later():
    config = make(moe_router_bias=True, moe_router_enable_expert_bias=True).config
    router = TopKRouter(config, device="meta").to_empty(device="cpu")
    router.reset_parameters()
    assert 0.3 < router.weight.std() < 0.7
    assert not router.bias.any()
    assert not router.e_score_correction_bias.any()
    assert not router.tokens_per_expert.any()


def test_counts_without_expert_bias_go_nowhere():
    router = make()
    router.count(torch.ones(8, dtype=torch.int64))
    assert dict(router.named_buffers()) == {}


def test_arguments_that_do_not_fit_are_refused():
    router, x = make(moe_input_jitter_eps=0.1), torch.zeros(3, 16)
    with pytest.raises(ValueError, match=r"\[tokens, hidden_size=16\], got shape \(3, 5\)"):
        router(torch.empty(3, 5))
    with pytest.raises(ValueError, match=r"moe_input_jitter_eps=0.1 draws noise by token"):
        router(x)
    with pytest.raises(ValueError, match=r"token_ids_T has shape \(2,\), but there are 3 tokens"):
        router(x, token_ids_T=torch.arange(2))
    router.eval()
    with pytest.raises(TypeError, match=r"token_ids_T is torch\.float32; give integers"):
        router(x, token_ids_T=torch.tensor([0.9, 0.1, 0.5]))
    with pytest.raises(TypeError, match=r"int32; convert it to torch\.int64"):
        router(x, topk_idx_TK=torch.zeros(3, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"shape \(2, 2\), but there are 3 tokens"):
        router(x, topk_idx_TK=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"values from 0 to 8; experts are 0 to 7"):
        router(x, topk_idx_TK=torch.tensor([[0, 8]] * 3))
    with pytest.raises(ValueError, match=r"values from -2 to 1"):
        router(x, topk_idx_TK=torch.tensor([[-2, 1]] * 3))
    with pytest.raises(ValueError, match="give the logits that the first forward"):
        router(x, logits_TE=torch.zeros(2, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_gpu_routing_agrees_with_the_cpu(seed, rule):
    router = make(experts=60, k=4, dtype=torch.float64, **RULES[rule])
    x = torch.randn(100, 16, dtype=torch.float64)
    expected = router(x)
    got = router.cuda()(x.cuda())
    assert torch.equal(got.plan.topk_idx_TK.cpu(), expected.plan.topk_idx_TK)
    assert torch.equal(got.plan.counts_E.cpu(), expected.plan.counts_E)
    assert_close(got.topk_weights_TK.cpu(), expected.topk_weights_TK, atol=1e-12, rtol=1e-12)

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.capacity import expert_capacity
from moe_pipeline.router.expert_choice import choose_tokens
from moe_pipeline.router.top_k import TopKRouter
from ranktest import run_ranks


def config_for(experts=8, k=2, **router):
    return MoEConfig(
        hidden_size=6,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(moe_router_selection="expert_choice", **router),
        initializer_range=1.0,
    )


def taken_by_hand(scores, capacity):
    """Each expert in turn; then each token's experts, best first."""
    num_tokens, num_experts = len(scores), len(scores[0]) if scores else 0
    taken = [[] for _ in scores]
    for expert in range(num_experts):
        queue = sorted(range(num_tokens), key=lambda token: (-scores[token][expert], token))
        for token in queue[:capacity]:
            taken[token].append(expert)
    return [
        sorted(own, key=lambda e: (-scores[token][e], e)) + [-1] * (num_experts - len(own))
        for token, own in enumerate(taken)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [None, 0.2, 1.5, 50.0])
@pytest.mark.parametrize(("experts", "k"), [(8, 1), (60, 8), (1, 1)])
def test_choice_equals_brute_force(seed, experts, k, factor, dtype):
    config = config_for(experts, k, moe_expert_capacity_factor=factor)
    scores = (torch.randint(0, 6, (30, experts)) / 8).to(dtype)
    got = choose_tokens(scores, config, groups=MoEGroups())
    assert got.tolist() == taken_by_hand(scores.tolist(), expert_capacity(30, config))


@pytest.mark.parametrize("with_ids", [False, True])
def test_every_layout_chooses_the_same(seed, with_ids):
    config, counts = config_for(12, 3), [5, 0, 11, 8]
    scores = torch.randint(0, 6, (sum(counts), 12)).double() / 8
    order = torch.randperm(sum(counts)) if with_ids else torch.arange(sum(counts))
    expected = torch.tensor(taken_by_hand(scores.tolist(), 6))

    def fn(rank, world_size):
        own = order.split(counts)[rank]
        groups = MoEGroups(tokens=dist.group.WORLD)
        ids = own if with_ids else None
        return torch.equal(
            choose_tokens(scores[own], config, groups=groups, token_ids_T=ids), expected[own]
        )

    assert run_ranks(fn, len(counts)) == [True] * len(counts)


@pytest.mark.parametrize("norm", [False, True])
def test_router_loads_experts_equally_and_weighs_by_scores(seed, norm):
    router = TopKRouter(config_for(8, 2, norm_topk_prob=norm), dtype=torch.float64)
    x = torch.randn(20, 6, dtype=torch.float64)
    routed = router(x)
    assert routed.plan.counts_E.tolist() == [5] * 8
    assert routed.plan.topk_idx_TK.shape == (20, 8)
    probs = torch.softmax(x @ router.weight.t(), 1)
    idx = torch.tensor(taken_by_hand(probs.tolist(), 5))
    assert torch.equal(routed.plan.topk_idx_TK, idx)
    weights = probs.gather(1, idx.clamp(min=0)) * (idx >= 0)
    if norm:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
    assert_close(routed.topk_weights_TK, weights)
    factors = torch.randn_like(weights)
    ours = torch.autograd.grad((routed.topk_weights_TK * factors).sum(), router.weight)
    theirs = torch.autograd.grad((weights * factors).sum(), router.weight)
    assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_no_tokens_is_fine():
    routed = TopKRouter(config_for())(torch.empty(0, 6))
    assert routed.plan.topk_idx_TK.shape == (0, 8)
    assert routed.plan.counts_E.tolist() == [0] * 8


def test_options_of_token_choice_are_refused():
    with pytest.raises(ValueError, match="balances the load itself"):
        config_for(moe_router_enable_expert_bias=True)
    with pytest.raises(ValueError, match="n_group=2 limits the choice of tokens"):
        config_for(n_group=2, topk_group=1)


@pytest.mark.gpu
def test_gpu_chooses_as_the_cpu(seed):
    scores, config = torch.randint(0, 6, (300, 60)) / 8, config_for(60, 8)
    expected = choose_tokens(scores, config, groups=MoEGroups())
    assert torch.equal(choose_tokens(scores.cuda(), config, groups=MoEGroups()).cpu(), expected)

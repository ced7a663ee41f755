from math import ceil

import pytest
import torch
import torch.distributed as dist

from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.capacity import drop_over_capacity, expert_capacity
from moe_pipeline.router.top_k import TopKRouter
from ranktest import run_ranks

POLICIES = ["probs", "position"]


def config_for(experts, k, factor, policy="probs", **router):
    return MoEConfig(
        hidden_size=6,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(
            moe_expert_capacity_factor=factor, moe_token_drop_policy=policy, **router
        ),
        initializer_range=1.0,
    )


def dropped_by_hand(idx, probs, config):
    """Each expert's queue in turn."""
    kept = [list(row) for row in idx]
    by_probability = config.router.moe_token_drop_policy == "probs"
    for expert in range(config.num_experts):
        queue = [token for token, row in enumerate(idx) if expert in row]
        if by_probability:
            queue.sort(key=lambda token: (-probs[token][expert], token))
        for token in queue[expert_capacity(len(idx), config) :]:
            kept[token][idx[token].index(expert)] = -1
    return kept


def unbalanced_choices(tokens, experts, k):
    """Probabilities of few levels, so that many are equal, and choices that favour the first."""
    probs = torch.randint(1, 4, (tokens, experts)).double() / 8
    order = torch.rand(tokens, experts) + torch.linspace(1, 0, experts)
    return order.argsort(1, descending=True)[:, :k], probs


@pytest.mark.parametrize(
    ("factor", "tokens", "k", "experts", "expected"),
    [
        (1.0, 8, 2, 8, 2),
        (1.0, 9, 2, 8, 3),
        (1.1, 10, 1, 1, 11),
        (0.1, 30, 1, 1, 3),
        (1.25, 60, 8, 60, 10),
        (1e-9, 1, 1, 1, 1),
        (2.0, 0, 2, 8, 0),
        (None, 7, 1, 3, 3),
    ],
)
def test_capacity_is_the_ceiling_of_the_share(factor, tokens, k, experts, expected):
    assert expert_capacity(tokens, config_for(experts, k, factor)) == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 100.0])
@pytest.mark.parametrize(("experts", "k"), [(8, 1), (8, 2), (60, 8)])
def test_dropping_equals_brute_force(seed, experts, k, factor, policy):
    config = config_for(experts, k, factor, policy)
    idx, probs = unbalanced_choices(40, experts, k)
    got = drop_over_capacity(idx, probs, config, groups=MoEGroups())
    assert got.tolist() == dropped_by_hand(idx.tolist(), probs.tolist(), config)
    assert (got == -1).any() == (factor < 100)


def test_choices_that_are_missing_take_no_room(seed):
    config = config_for(2, 1, 1.0)
    idx = torch.tensor([[-1], [0], [-1], [0]])
    got = drop_over_capacity(idx, torch.full((4, 2), 0.5), config, groups=MoEGroups())
    assert got.tolist() == idx.tolist()


def test_position_is_that_of_the_token_ids():
    config = config_for(2, 1, 0.5, "position")
    idx, probs = torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 2), 0.5)
    ids = torch.tensor([30, 10, 40, 20])
    got = drop_over_capacity(idx, probs, config, groups=MoEGroups(), token_ids_T=ids)
    assert got.tolist() == [[-1], [0], [-1], [-1]]


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_layout_drops_the_same_rows(seed, policy, with_ids):
    config = config_for(8, 3, 0.8, policy)
    counts = [5, 0, 11, 8]
    idx, probs = unbalanced_choices(sum(counts), 8, 3)
    # With ids the ranks hold any tokens, without they hold consecutive ones.
    order = torch.randperm(sum(counts)) if with_ids else torch.arange(sum(counts))
    expected = drop_over_capacity(idx, probs, config, groups=MoEGroups())

    def fn(rank, world_size):
        own = order.split(counts)[rank]
        got = drop_over_capacity(
            idx[own],
            probs[own],
            config,
            groups=MoEGroups(tokens=dist.group.WORLD),
            token_ids_T=own if with_ids else None,
        )
        return torch.equal(got, expected[own])

    assert (expected == -1).any()
    assert run_ranks(fn, len(counts)) == [True] * len(counts)


@pytest.mark.parametrize("policy", POLICIES)
def test_router_drops_the_rows_and_counts_them_all(seed, policy):
    config = config_for(8, 2, 0.6, policy)
    router, x = TopKRouter(config), torch.randn(30, 6)
    routed = router(x)
    capacity = ceil(0.6 * 30 * 2 / 8)
    idx = routed.plan.topk_idx_TK
    all_idx = routed.probs_TE.topk(2).indices
    expected = dropped_by_hand(all_idx.tolist(), routed.probs_TE.tolist(), config)
    assert idx.tolist() == expected
    assert (torch.bincount(idx[idx >= 0]) <= capacity).all()
    assert torch.equal(routed.plan.undropped_idx_TK, all_idx)
    assert torch.equal(routed.plan.counts_E, torch.bincount(all_idx.flatten(), minlength=8))
    assert (routed.topk_weights_TK[idx < 0] == 0).all()
    totals = routed.topk_weights_TK.sum(1)
    torch.testing.assert_close(totals, (idx >= 0).any(1).float())
    routed.topk_weights_TK.square().sum().backward()
    assert router.weight.grad.isfinite().all()


def test_no_tokens_is_fine():
    routed = TopKRouter(config_for(8, 2, 1.0))(torch.empty(0, 6))
    assert routed.plan.topk_idx_TK.shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_gpu_drops_as_the_cpu(seed, policy):
    config = config_for(60, 8, 0.7, policy)
    idx, probs = unbalanced_choices(300, 60, 8)
    expected = drop_over_capacity(idx, probs, config, groups=MoEGroups())
    got = drop_over_capacity(idx.cuda(), probs.cuda(), config, groups=MoEGroups())
    assert torch.equal(got.cpu(), expected)

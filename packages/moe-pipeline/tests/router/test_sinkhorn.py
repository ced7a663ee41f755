import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig, RouterOptions
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.sinkhorn import sinkhorn_offsets
from moe_pipeline.router.top_k import TopKRouter
from ranktest import run_ranks


def config_for(experts=8, k=1, **router):
    return MoEConfig(
        hidden_size=6,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        router=RouterOptions(moe_router_selection="sinkhorn", **router),
        initializer_range=0.5,
    )


def scaled_by_hand(logits, rounds=3000):
    """Rows to 1 and columns to T / E in turn, until nothing changes."""
    matrix = torch.exp(logits)
    for _ in range(rounds):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True) * (len(logits) / logits.shape[1])
    return matrix


@pytest.mark.parametrize("experts", [5, 8, 60])
def test_offsets_scale_the_matrix_as_sinkhorn_does(seed, experts):
    logits = torch.randn(40, experts, dtype=torch.float64) * 2 + torch.linspace(0, 4, experts)
    offsets = sinkhorn_offsets(logits, groups=MoEGroups())
    got, expected = torch.softmax(logits + offsets, 1), scaled_by_hand(logits)
    assert_close(got.sum(0), torch.full((experts,), 40 / experts).double(), atol=0, rtol=1e-3)
    assert_close(got, expected / expected.sum(1, keepdim=True), atol=1e-4, rtol=1e-2)


def test_large_logits_overflow_nothing(seed):
    logits = torch.randn(30, 6) * 30 + 1000
    offsets = sinkhorn_offsets(logits, groups=MoEGroups())
    assert offsets.isfinite().all()


@pytest.mark.parametrize("with_ids", [False, True])
def test_every_layout_has_the_same_offsets(seed, with_ids):
    counts = [5, 0, 11, 8]
    logits = torch.randn(sum(counts), 7) * 3
    order = torch.randperm(sum(counts)) if with_ids else torch.arange(sum(counts))
    expected = sinkhorn_offsets(logits, groups=MoEGroups())

    def fn(rank, world_size):
        own = order.split(counts)[rank]
        groups = MoEGroups(tokens=dist.group.WORLD)
        ids = own if with_ids else None
        return torch.equal(sinkhorn_offsets(logits[own], groups=groups, token_ids_T=ids), expected)

    assert run_ranks(fn, len(counts)) == [True] * len(counts)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k", [1, 3])
def test_training_chooses_by_the_scaled_matrix_and_weighs_by_scores(seed, k, function):
    router = TopKRouter(config_for(8, k, moe_router_score_function=function), dtype=torch.float64)
    x = torch.randn(64, 6, dtype=torch.float64) + 1
    routed = router(x)
    logits = x @ router.weight.t()
    chosen = routed.plan.topk_idx_TK
    best = scaled_by_hand(logits).sort(1, descending=True)
    # Tokens whose choice hangs on less than the iteration's tolerance may fall either way.
    clear = best.values[:, k - 1] > best.values[:, k] * 1.01
    assert clear.sum() > 50
    sets = chosen.sort(1).values, best.indices[:, :k].sort(1).values
    assert torch.equal(sets[0][clear], sets[1][clear])
    scores = torch.softmax(logits, 1) if function == "softmax" else torch.sigmoid(logits)
    weights = scores.gather(1, chosen)
    assert_close(routed.topk_weights_TK, weights / weights.sum(1, keepdim=True))


def test_training_loads_experts_more_evenly_than_evaluation(seed):
    router = TopKRouter(config_for(8, 1), dtype=torch.float64)
    x = torch.randn(256, 6, dtype=torch.float64)
    with torch.no_grad():
        router.weight[0] += 2 * x.mean(0)
        router.weight[:, 0] = torch.linspace(0, 3, 8)
        x[:, 0] = 1
    balanced = router(x).plan.counts_E
    router.eval()
    plain = router(x).plan
    assert torch.equal(plain.topk_idx_TK, (x @ router.weight.t()).argmax(1, keepdim=True))
    assert balanced.max() < plain.counts_E.max()


def test_no_tokens_is_fine():
    assert sinkhorn_offsets(torch.empty(0, 4), groups=MoEGroups()).tolist() == [0.0] * 4
    assert TopKRouter(config_for(8, 2))(torch.empty(0, 6)).plan.topk_idx_TK.shape == (0, 2)


def test_expert_bias_is_refused():
    with pytest.raises(ValueError, match="balances the load itself"):
        config_for(moe_router_enable_expert_bias=True)

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.aux_loss import balancing_loss
from moe_pipeline.config import MoEConfig
from moe_pipeline.router import TopKRouter
from ranktest import run_ranks


def make(scope="micro_batch", experts=6, k=2, coef=0.1):
    config = MoEConfig(
        hidden_size=8,
        moe_intermediate_size=4,
        num_experts=experts,
        num_experts_per_tok=k,
        router_aux_loss_coef=coef,
        moe_aux_loss_scope=scope,
        initializer_range=0.5,
    )
    return TopKRouter(config, dtype=torch.float64)


def brute_force(router, x_TD):
    """`coef * E * sum_e f_e P_e`, written out for one set of tokens."""
    config = router.config
    probs = torch.softmax(x_TD @ router.weight.t(), dim=-1)
    counts = torch.zeros(config.num_experts, dtype=torch.float64)
    for row in probs.topk(config.num_experts_per_tok).indices.tolist():
        for expert in row:
            counts[expert] += 1
    fractions = counts / counts.sum()
    total = sum(fractions[e] * probs[:, e].mean() for e in range(config.num_experts))
    return config.router_aux_loss_coef * config.num_experts * total, counts.long()


def test_micro_batch_loss_equals_the_formula(seed):
    router, x = make(), torch.randn(31, 8, dtype=torch.float64)
    loss, load = balancing_loss(router(x), router.config, sequence_shape=None)
    expected, counts = brute_force(router, x)
    assert_close(loss, expected, atol=1e-14, rtol=1e-12)
    assert torch.equal(load, counts)
    assert not load.requires_grad
    ours, theirs = (torch.autograd.grad(v, router.weight)[0] for v in (loss, expected))
    assert_close(ours, theirs, atol=1e-14, rtol=1e-10)


def test_sequence_loss_is_the_mean_over_sequences(seed):
    router, x = make("sequence"), torch.randn(3, 7, 8, dtype=torch.float64)
    loss, load = balancing_loss(router(x.reshape(21, 8)), router.config, sequence_shape=(3, 7))
    expected = sum(brute_force(router, x[i])[0] for i in range(3)) / 3
    assert_close(loss, expected, atol=1e-14, rtol=1e-12)
    assert load.sum() == 42
    ours, theirs = (torch.autograd.grad(v, router.weight)[0] for v in (loss, expected))
    assert_close(ours, theirs, atol=1e-14, rtol=1e-10)


def test_balanced_routing_costs_the_coefficient():
    router = make(experts=4, k=4, coef=0.25)
    loss, _ = balancing_loss(router(torch.zeros(5, 8).double()), router.config, sequence_shape=None)
    assert_close(loss.item(), 0.25)


@pytest.mark.parametrize(("scope", "shape"), [("micro_batch", None), ("sequence", (0, 5))])
def test_no_tokens_cost_nothing_and_stay_differentiable(scope, shape):
    router = make(scope)
    routed = router(torch.empty(0, 8, dtype=torch.float64))
    loss, load = balancing_loss(routed, router.config, sequence_shape=shape)
    loss.backward()
    assert loss.item() == 0.0
    assert load.tolist() == [0] * 6
    assert not router.weight.grad.any()


def test_sequence_scope_without_sequences_is_refused():
    router = make("sequence")
    with pytest.raises(ValueError, match=r"pass the layer \[batch, sequence, hidden\]"):
        balancing_loss(router(torch.zeros(4, 8).double()), router.config, sequence_shape=None)


@pytest.mark.parametrize("scope", ["micro_batch", "sequence"])
def test_shares_of_ranks_sum_to_the_loss_of_one_process(seed, scope):
    router = make(scope)
    x = torch.randn(6, 5, 8, dtype=torch.float64)
    # Rank 1 has no sequence at all; the others have unequal numbers.
    pieces = [x[:1], x[:0], x[1:4], x[4:]]

    def fn(rank, world_size):
        own = pieces[rank]
        loss, load = balancing_loss(
            router(own.reshape(-1, 8)),
            router.config,
            sequence_shape=(own.shape[0], 5),
            token_group=torch.distributed.group.WORLD,
        )
        (grad,) = torch.autograd.grad(loss, router.weight)
        return loss.item(), load.tolist(), grad.numpy()

    ranks = run_ranks(fn, 4)
    loss, load = balancing_loss(router(x.reshape(-1, 8)), router.config, sequence_shape=(6, 5))
    (grad,) = torch.autograd.grad(loss, router.weight)
    assert abs(sum(r[0] for r in ranks) - loss.item()) < 1e-14
    assert all(r[1] == load.tolist() for r in ranks)
    assert_close(torch.from_numpy(sum(r[2] for r in ranks)), grad, atol=1e-14, rtol=1e-12)

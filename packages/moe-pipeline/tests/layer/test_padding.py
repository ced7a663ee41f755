"""A layer with padding against the same layer and tokens without it."""

import pytest
import torch
from torch.testing import assert_close

from moe_pipeline.config import MoEConfig, RouterLosses, RouterOptions, SharedExpertOptions
from moe_pipeline.layer.moe_layer import MoELayer
from moe_pipeline.layer.router_replay import record_routing, replay_routing
from moe_pipeline.recomputation import recompute
from moe_pipeline.router.aux_loss import global_batch_loss
from moe_pipeline.router.expert_bias import update_expert_bias

B, S, HIDDEN, EXPERTS = 4, 6, 8, 6
IS_TOKEN = torch.ones(B, S, dtype=torch.bool)
IS_TOKEN[0, 4:], IS_TOKEN[1, :2], IS_TOKEN[2] = False, False, False
ROUTERS = {
    "softmax": RouterOptions(moe_router_enable_expert_bias=True),
    "jitter": RouterOptions(moe_input_jitter_eps=0.2),
    "capacity": RouterOptions(moe_expert_capacity_factor=0.6),
    "position": RouterOptions(moe_expert_capacity_factor=0.6, moe_token_drop_policy="position"),
    "expert choice": RouterOptions(moe_router_selection="expert_choice"),
    "sinkhorn": RouterOptions(moe_router_selection="sinkhorn"),
}


def layer_for(router, scope="microbatch"):
    losses = RouterLosses(
        router_aux_loss_coef=0.3, router_z_loss_coef=0.2, moe_aux_loss_scope=scope
    )
    config = MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=5,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        router=router,
        losses=losses,
        shared_expert=SharedExpertOptions(
            moe_shared_expert_intermediate_size=7, moe_shared_expert_gate=True
        ),
        initializer_range=0.5,
    )
    return MoELayer(config, dtype=torch.float64)


def places():
    return IS_TOKEN.flatten().nonzero().flatten()


def run(layer, x, *, call=None, **given):
    """Output, losses, loads and gradients of one forward and backward."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = (call or layer)(x, **given)
    aux = out.aux_loss
    if layer.config.losses.moe_aux_loss_scope == "global_batch":
        aux = global_batch_loss([out.balance], layer.config)
    weights = torch.linspace(-1, 1, HIDDEN, dtype=x.dtype)
    (out.hidden.square() @ weights).sum().add(aux + out.z_loss).backward()
    return out, aux.detach(), x.grad, [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_are_treated_as_if_there_were_no_padding(seed, name, recomputed):
    layer = layer_for(ROUTERS[name])
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    ids = torch.arange(B * S)
    kept = places()
    plain, aux, grad_x, grads = run(layer, x.view(-1, HIDDEN)[kept], token_ids_T=ids[kept])
    x[~IS_TOKEN] = torch.nan  # would show wherever it came to
    call = (lambda *args, **kwargs: recompute(layer, *args, **kwargs)) if recomputed else None
    padded, padded_aux, padded_grad_x, padded_grads = run(
        layer, x, call=call, token_ids_T=ids, token_idx_N=kept
    )
    assert_close(padded.hidden[IS_TOKEN], plain.hidden, atol=1e-13, rtol=1e-13)
    assert not padded.hidden[~IS_TOKEN].any()
    assert_close(padded_aux, aux, atol=1e-14, rtol=1e-13)
    assert_close(padded.z_loss, plain.z_loss, atol=1e-14, rtol=1e-13)
    assert torch.equal(padded.load_E, plain.load_E)
    assert torch.equal(padded.topk_idx_TK[kept], plain.topk_idx_TK)
    assert (padded.topk_idx_TK[~IS_TOKEN.flatten()] == -1).all()
    assert_close(padded_grad_x[IS_TOKEN], grad_x, atol=1e-12, rtol=1e-12)
    assert not padded_grad_x[~IS_TOKEN].any()
    assert_close(padded_grads, grads, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_balancing_losses_are_those_of_the_sequences_without_padding(seed, scope):
    layer = layer_for(ROUTERS["softmax"], scope)
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    aux = run(layer, x, token_idx_N=places())[1]
    rows = [x[b, IS_TOKEN[b]][None] for b in range(B) if IS_TOKEN[b].any()]
    if scope == "sequence":  # each for itself, then the mean
        alone = [run(layer_for_same(layer, "sequence"), row) for row in rows]
        expected = sum(each[1] for each in alone) / len(rows)
    else:
        expected = run(layer, torch.cat(rows, dim=1))[1]
    assert aux > 0.1
    assert_close(aux, expected, atol=1e-14, rtol=1e-13)


def layer_for_same(layer, scope):
    other = layer_for(ROUTERS["softmax"], scope)
    other.load_state_dict(layer.state_dict())
    return other


def test_bias_update_does_not_count_padding(seed):
    layer, other = (layer_for(ROUTERS["softmax"]) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    layer(x, token_idx_N=places())
    other(x[IS_TOKEN])
    assert torch.equal(layer.gate.tokens_per_expert, other.gate.tokens_per_expert)
    for each in (layer, other):
        update_expert_bias([each.gate])
    bias = layer.gate.e_score_correction_bias
    assert bias.any() and torch.equal(bias, other.gate.e_score_correction_bias)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global_batch"])
def test_a_batch_of_padding_alone_gives_zeros(seed, scope):
    layer = layer_for(ROUTERS["softmax"], scope)
    x = torch.full((2, 3, HIDDEN), torch.nan, dtype=torch.float64)
    out, aux, grad_x, grads = run(layer, x, token_idx_N=torch.empty(0, dtype=torch.int64))
    assert not out.hidden.any() and not out.load_E.any() and aux == out.z_loss == 0
    assert not grad_x.any()
    assert not any(grad.any() for grad in grads)


def test_replayed_routing_has_no_expert_for_padding(seed):
    layer = layer_for(ROUTERS["softmax"])
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    with record_routing(layer) as choices:
        expected = layer(x, token_idx_N=places()).hidden
    assert (choices["0"][~IS_TOKEN.flatten()] == -1).all()
    with replay_routing(layer, choices):
        assert torch.equal(layer(x, token_idx_N=places()).hidden, expected)


def test_evaluation_leaves_padding_out_too(seed):
    layer = layer_for(ROUTERS["softmax"]).eval()
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    out = layer(x, token_idx_N=places())
    assert int(out.load_E.sum()) == 2 * int(IS_TOKEN.sum())
    assert_close(out.hidden[IS_TOKEN], layer(x[IS_TOKEN]).hidden, atol=1e-13, rtol=1e-13)


def test_places_are_int64_and_not_more_than_there_are():
    layer = layer_for(ROUTERS["softmax"])
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    with pytest.raises(TypeError, match="nonzero"):
        layer(x, token_idx_N=IS_TOKEN.flatten())
    with pytest.raises(ValueError, match="24 places"):
        layer(x, token_idx_N=torch.arange(25))
    with pytest.raises(TypeError, match="token_idx_N must be a Tensor, got a list"):
        layer(x, token_idx_N=[0, 1])


@pytest.mark.parametrize("rows", [30, 16])
def test_choices_and_ids_have_a_row_for_each_place(rows):
    layer = layer_for(ROUTERS["softmax"])
    x = torch.randn(B, S, HIDDEN, dtype=torch.float64)
    given = {
        "topk_idx_TK": torch.zeros(rows, 2, dtype=torch.int64),
        "token_ids_T": torch.arange(rows),
    }
    for name, tensor in given.items():
        with pytest.raises(ValueError, match=rf"{name} has shape \({rows},.*24 places"):
            layer(x, token_idx_N=places(), **{name: tensor})

import re

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterOptions,
    SharedExpertOptions,
)
from moe_pipeline.families.upcycling import upcycled_state

HIDDEN, UNITS = 16, 24


def config_for(width, num_experts, k, **kwargs):
    return MoEConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=width,
        num_experts=num_experts,
        num_experts_per_tok=k,
        initializer_range=0.5,
        **kwargs,
    )


def dense_weights(units=UNITS, bias=False, dtype=torch.float64):
    shapes = {
        "gate_proj": (units, HIDDEN),
        "up_proj": (units, HIDDEN),
        "down_proj": (HIDDEN, units),
    }
    state = {f"{n}.weight": torch.randn(s, dtype=dtype) / 4 for n, s in shapes.items()}
    if bias:
        state |= {f"{n}.bias": torch.randn(s[0], dtype=dtype) for n, s in shapes.items()}
    return state


def dense_mlp(state, x, gated=True):
    def linear(name, x):
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    if not gated:
        return linear("down_proj", F.gelu(linear("up_proj", x)))
    return linear("down_proj", F.silu(linear("gate_proj", x)) * linear("up_proj", x))


def moe_block(state, x, config):
    """Expert by expert, token by token: the definition of the block."""
    options, router = config.experts, config.router
    logits = x @ state["gate.weight"].t()
    scores = (
        logits.sigmoid() if router.moe_router_score_function == "sigmoid" else logits.softmax(-1)
    )
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    idx = order.indices[:, : config.num_experts_per_tok]
    weights = scores.gather(1, idx)
    if router.norm_topk_prob or not router.moe_router_pre_softmax:
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * router.routed_scaling_factor
    fused = "gate_up_proj" if options.has_gate else "up_proj"
    rows = []
    for token, experts in enumerate(idx.tolist()):
        total = torch.zeros_like(x[token])
        for choice, expert in enumerate(experts):
            both = state[f"experts.{fused}"][expert] @ x[token]
            if options.has_bias:
                both = both + state[f"experts.{fused}_bias"][expert]
            gate, up = both.chunk(2) if options.has_gate else (both, 1.0)
            act = F.silu(gate) * up if options.has_gate else F.gelu(gate)
            y = state["experts.down_proj"][expert] @ act
            if options.has_bias:
                y = y + state["experts.down_proj_bias"][expert]
            total = total + weights[token, choice] * y
        rows.append(total)
    out = torch.stack(rows)
    if config.shared_expert is not None:
        shared = {
            name.removeprefix("shared_experts."): tensor
            for name, tensor in state.items()
            if name.startswith("shared_experts.")
        }
        y = dense_mlp(shared, x)
        if config.shared_expert.moe_shared_expert_gate:
            y = torch.sigmoid(x @ state["shared_expert_gate.weight"].t()) * y
        out = out + y
    return out, idx


SIGMOID = RouterOptions(moe_router_score_function="sigmoid", routed_scaling_factor=2.5)


@pytest.mark.parametrize(
    ("width", "experts", "k"),
    [(24, 8, 1), (24, 5, 2), (6, 32, 4), (6, 20, 8), (3, 64, 8), (8, 60, 3), (8, 6, 6)],
)
@pytest.mark.parametrize(
    "router",
    [RouterOptions(), SIGMOID, RouterOptions(moe_router_pre_softmax=False, norm_topk_prob=False)],
)
def test_the_upcycled_block_equals_the_dense_mlp(seed, router, width, experts, k):
    config = config_for(width, experts, k, router=router)
    dense, x = dense_weights(), torch.randn(40, HIDDEN, dtype=torch.float64)
    out, idx = moe_block(upcycled_state(dense, config, seed=seed), x, config)
    assert_close(out, dense_mlp(dense, x), atol=1e-12, rtol=1e-12)
    if experts > k:
        assert len(idx.sort(1).values.unique(dim=0)) > 1  # tokens do choose different groups


def test_each_shard_of_a_token_comes_from_one_virtual_group(seed):
    config = config_for(6, 32, 4)
    dense, x = dense_weights(), torch.randn(50, HIDDEN, dtype=torch.float64)
    state = upcycled_state(dense, config)
    _, idx = moe_block(state, x, config)
    assert torch.equal(idx // 4, (idx[:, :1] // 4).expand(-1, 4))
    assert torch.equal(idx % 4, torch.arange(4).expand(50, -1))
    rows = state["gate.weight"].unflatten(0, (8, 4))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))


def test_powers_of_two_cost_no_rounding(seed):
    config = config_for(6, 8, 4)
    dense = dense_weights(dtype=torch.bfloat16)
    state = upcycled_state(dense, config)
    gate, up = state["experts.gate_up_proj"][:4].chunk(2, dim=1)
    assert torch.equal(gate.flatten(0, 1), dense["gate_proj.weight"])
    assert torch.equal(up.flatten(0, 1), dense["up_proj.weight"])
    down = state["experts.down_proj"][:4].transpose(1, 2).flatten(0, 1).t() / 4
    assert torch.equal(down, dense["down_proj.weight"])


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert_takes_the_first_units(seed, gated):
    shared = SharedExpertOptions(
        moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=gated
    )
    config = config_for(4, 12, 4, shared_expert=shared)
    dense, x = dense_weights(), torch.randn(20, HIDDEN, dtype=torch.float64)
    out, _ = moe_block(upcycled_state(dense, config), x, config)
    assert_close(out, dense_mlp(dense, x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("gated", [True, False])
def test_biases_and_experts_without_a_gate(seed, gated):
    experts = ExpertsOptions(has_bias=True, has_gate=gated, hidden_act="silu" if gated else "gelu")
    config = config_for(8, 12, 6, experts=experts, router=SIGMOID)
    dense, x = dense_weights(bias=True), torch.randn(20, HIDDEN, dtype=torch.float64)
    dense = {name: each for name, each in dense.items() if gated or "gate" not in name}
    out, _ = moe_block(upcycled_state(dense, config), x, config)
    assert_close(out, dense_mlp(dense, x, gated), atol=1e-12, rtol=1e-12)


def test_a_rank_gets_its_own_experts(seed):
    config = config_for(8, 12, 3)
    dense = dense_weights()
    whole = upcycled_state(dense, config, seed=5)
    part = upcycled_state(dense, config, seed=5, local_experts=range(4, 8))
    assert torch.equal(part["gate.weight"], whole["gate.weight"])
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert torch.equal(part[name], whole[name][4:8])
        assert part[name].is_contiguous()
    none = upcycled_state(dense, config, local_experts=range(0))  # as by `MoEGroups.ep_parts`
    assert {name: tuple(each.shape) for name, each in none.items()} == {
        "gate.weight": (12, HIDDEN),
        "experts.gate_up_proj": (0, 16, HIDDEN),
        "experts.down_proj": (0, HIDDEN, 8),
    }


@pytest.mark.parametrize("local", [range(8, 16), range(-4, 0)])
def test_experts_that_the_layer_does_not_have_are_refused(local):
    with pytest.raises(ValueError, match=rf"local_experts={re.escape(str(local))} .* in 0\.\.11"):
        upcycled_state(dense_weights(), config_for(8, 12, 3), local_experts=local)


def test_the_state_is_the_same_under_every_default_of_torch(seed):
    router = RouterOptions(moe_router_enable_expert_bias=True)
    config, dense = config_for(6, 8, 4, router=router), dense_weights()
    expected = upcycled_state(dense, config)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = upcycled_state(dense, config)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_plain_probabilities_need_consent_and_get_the_factor_of_equal_ones(seed):
    router = RouterOptions(norm_topk_prob=False)
    config = config_for(6, 16, 8, router=router)
    dense = dense_weights()
    with pytest.raises(ValueError, match="norm_topk_prob=True"):
        upcycled_state(dense, config)
    with pytest.raises(TypeError, match="approximate must be a bool"):
        upcycled_state(dense, config, approximate="false")
    state = upcycled_state(dense, config, approximate=True)
    down = state["experts.down_proj"][:4].transpose(1, 2).flatten(0, 1).t()
    assert_close(down / dense["down_proj.weight"], torch.full_like(down, 4 * 16 / 8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_for(7, 8, 2), "divide the 24 units"),
        (config_for(48, 8, 2), "divide the 24 units"),
        (config_for(6, 30, 4), "num_experts=30 must be a multiple of 4"),
        (config_for(6, 32, 6), "num_experts_per_tok=6 must be a multiple of 4"),
        (config_for(6, 8, 4, moe_latent_size=4), "moe_latent_size=4"),
        (
            config_for(6, 8, 4, router=RouterOptions(n_group=4, topk_group=2)),
            "n_group=4 makes groups of 2",
        ),
        (
            config_for(6, 8, 4, router=RouterOptions(moe_router_selection="expert_choice")),
            "expert_choice",
        ),
        (
            config_for(
                4,
                12,
                4,
                experts=ExpertsOptions(has_bias=True),
                shared_expert=SharedExpertOptions(moe_shared_expert_intermediate_size=8),
            ),
            "shared_expert=None",
        ),
    ],
)
def test_what_cannot_equal_the_mlp_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        upcycled_state(dense_weights(), config)


@pytest.mark.parametrize(
    ("dense", "experts", "message"),
    [
        (dense_weights(bias=True), {}, "has_bias=False has .*got .*down_proj.bias"),
        (dense_weights(), {"has_bias": True}, "has_bias=True has .*up_proj.bias"),
        (dense_weights(), {"has_gate": False, "hidden_act": "gelu"}, "has_gate=False"),
        (
            {**dense_weights(), "gate_proj.weight": torch.zeros(12, HIDDEN)},
            {},
            r"gate_proj.weight .* \(12, 16\).* 24 units .* \(24, 16\)",
        ),
        (
            {**dense_weights(), "down_proj.weight": torch.zeros(12, UNITS)},
            {},
            r"down_proj.weight .* \(12, 24\).*hidden_size=16",
        ),
    ],
)
def test_another_mlp_than_that_of_the_experts_is_refused(dense, experts, message):
    with pytest.raises(ValueError, match=message):
        upcycled_state(dense, config_for(6, 8, 4, experts=ExpertsOptions(**experts)))


def test_weights_of_zero_are_refused():
    config = config_for(6, 8, 4, router=RouterOptions(routed_scaling_factor=0.0))
    with pytest.raises(ValueError, match=r"routed_scaling_factor=0\.0"):
        upcycled_state(dense_weights(), config)

import pytest

from moe_pipeline.config import (
    ExpertsOptions,
    MoEConfig,
    RouterLosses,
    RouterOptions,
    SharedExpertOptions,
)

GOOD = dict(hidden_size=8, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize("wrong", ["false", None, 0])
def test_switches_are_bools(wrong):
    with pytest.raises(TypeError, match="norm_topk_prob must be a bool, got a"):
        RouterOptions(norm_topk_prob=wrong)
    with pytest.raises(TypeError, match="has_gate must be a bool, got a"):
        ExpertsOptions(has_gate=wrong)
    with pytest.raises(TypeError, match="moe_shared_expert_gate must be a bool, got a"):
        SharedExpertOptions(moe_shared_expert_intermediate_size=4, moe_shared_expert_gate=wrong)


def test_config_keeps_its_values_and_is_frozen():
    config = MoEConfig(**GOOD)
    assert (config.hidden_size, config.experts.experts_implementation) == (8, "auto")
    with pytest.raises(AttributeError):
        config.hidden_size = 9


def test_experts_are_as_wide_as_tokens_or_the_latent_space():
    assert MoEConfig(**GOOD).expert_size == 8
    assert MoEConfig(**GOOD, moe_latent_size=3).expert_size == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"hidden_size": -3}, "hidden_size must be at least 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds num_experts=4"),
        ({"initializer_range": -1.0}, "must be finite and not negative"),
        ({"moe_latent_size": 0}, "moe_latent_size must be at least 1"),
        ({"router": RouterOptions(n_group=3)}, "n_group=3 does not divide num_experts=4"),
        (
            {"router": RouterOptions(n_group=4, topk_group=1)},
            "topk_group=1 groups of 1 experts hold fewer than num_experts_per_tok=2",
        ),
        (
            {"router": RouterOptions(n_group=4, topk_group=2, moe_router_group_score="top2_sum")},
            "needs groups of at least 2 experts",
        ),
    ],
)
def test_config_refuses_what_no_layer_can_have(change, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (RouterLosses, {"router_aux_loss_coef": -0.1}, "must be finite and not negative"),
        (RouterLosses, {"router_aux_loss_coef": float("nan")}, "must be finite and not negative"),
        (RouterLosses, {"router_z_loss_coef": -1.0}, "router_z_loss_coef must be finite"),
        (RouterLosses, {"moe_aux_loss_scope": "token"}, "one of microbatch, sequence, global_ba"),
        (
            ExpertsOptions,
            {"experts_implementation": "fast"},
            "one of auto, fused, grouped_mm",
        ),
        (ExpertsOptions, {"hidden_act": "relu"}, "choose one of silu, gelu"),
        (ExpertsOptions, {"swiglu_limit": 7.0, "has_gate": False}, "is for gated silu experts"),
        (ExpertsOptions, {"swiglu_limit": 0.0}, "swiglu_limit=0.0 must be positive"),
        (ExpertsOptions, {"swiglu_limit": 7.0, "swiglu_alpha": 0.0}, "swiglu_alpha=0.0 must be"),
        (RouterOptions, {"moe_router_score_function": "relu"}, "choose one of softmax, sigmoid"),
        (RouterOptions, {"moe_router_selection": "best"}, "choose one of token_choice, expert_ch"),
        (RouterOptions, {"moe_token_drop_policy": "last"}, "choose one of probs, position"),
        (RouterOptions, {"moe_expert_capacity_factor": 0.0}, "leaves no room for any token"),
        (RouterOptions, {"moe_input_jitter_eps": 1.0}, "must be below 1"),
        (RouterOptions, {"moe_input_jitter_eps": -0.1}, "finite and not negative"),
        (RouterOptions, {"topk_group": 2}, "topk_group=2 exceeds n_group=1"),
        (
            RouterOptions,
            {"moe_router_pre_softmax": False, "moe_router_score_function": "sigmoid"},
            "is about softmax scores",
        ),
    ],
)
def test_options_refuse_what_has_no_meaning(options, change, words):
    with pytest.raises(ValueError, match=words):
        options(**change)


@pytest.mark.parametrize("value", [2.0, True, "8"])
def test_config_refuses_sizes_that_are_not_integers(value):
    with pytest.raises(TypeError, match="num_experts must be an int"):
        MoEConfig(**{**GOOD, "num_experts": value})
    with pytest.raises(TypeError, match="moe_shared_expert_intermediate_size must be an int"):
        SharedExpertOptions(moe_shared_expert_intermediate_size=value)

import json

import pytest
import torch

from moe_pipeline.config import ExpertsOptions, RouterOptions, SharedExpertOptions
from moe_pipeline.families.catalog import FAMILIES, family_of

E, D, H, S = 6, 8, 4, 5

# What transformers' block of each family holds, by its own names.
ROUTED = {
    "gate.weight": (E, D),
    "experts.gate_up_proj": (E, 2 * H, D),
    "experts.down_proj": (E, D, H),
}
SHARED = {"gate_proj.weight": (S, D), "up_proj.weight": (S, D), "down_proj.weight": (D, S)}
SHARED_EXPERTS = {f"shared_experts.{name}": shape for name, shape in SHARED.items()}
BLOCKS = {
    "mixtral": ROUTED,
    "olmoe": ROUTED,
    "qwen3_moe": ROUTED,
    "qwen2_moe": {
        **ROUTED,
        **{f"shared_expert.{name}": shape for name, shape in SHARED.items()},
        "shared_expert_gate.weight": (1, D),
    },
    "deepseek_v2": {**ROUTED, **SHARED_EXPERTS},
    "deepseek_v3": {**ROUTED, "gate.e_score_correction_bias": (E,), **SHARED_EXPERTS},
    "glm4_moe": {**ROUTED, "gate.e_score_correction_bias": (E,), **SHARED_EXPERTS},
    "ernie4_5_moe": {
        **ROUTED,
        "gate.moe_statics.e_score_correction_bias": (1, E),
        **SHARED_EXPERTS,
    },
    "gpt_oss": {
        "router.weight": (E, D),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, D, 2 * H),
        "experts.gate_up_proj_bias": (E, 2 * H),
        "experts.down_proj": (E, H, D),
        "experts.down_proj_bias": (E, D),
    },
}


def block_state(model_type):
    return {name: torch.randn(shape) for name, shape in BLOCKS[model_type].items()}


def test_every_family_is_tested():
    assert set(BLOCKS) == set(FAMILIES)


@pytest.mark.parametrize("model_type", BLOCKS)
def test_keys_come_back_bit_for_bit(seed, model_type):
    family, state = family_of(model_type), block_state(model_type)
    ours = family.from_transformers(state)
    assert ours["gate.weight"].shape == (E, D)
    assert ours["experts.gate_up_proj"].shape == (E, 2 * H, D)
    assert ours["experts.down_proj"].shape == (E, D, H)
    back = family.to_transformers(ours)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].is_contiguous()


def test_gpt_oss_gates_come_first_and_rows_are_outputs(seed):
    state = block_state("gpt_oss")
    ours = family_of("gpt_oss").from_transformers(state)
    for expert in range(E):
        theirs = state["experts.gate_up_proj"][expert].t()
        assert torch.equal(
            ours["experts.gate_up_proj"][expert], torch.cat((theirs[::2], theirs[1::2]))
        )
        bias = state["experts.gate_up_proj_bias"][expert]
        assert torch.equal(
            ours["experts.gate_up_proj_bias"][expert], torch.cat((bias[::2], bias[1::2]))
        )
        assert torch.equal(
            ours["experts.down_proj"][expert], state["experts.down_proj"][expert].t()
        )


def test_tensors_of_the_same_layout_are_not_copied(seed):
    state = block_state("qwen2_moe")
    ours = family_of("qwen2_moe").from_transformers(state)
    assert ours["shared_experts.up_proj.weight"] is state["shared_expert.up_proj.weight"]


def test_unknown_keys_are_refused(seed):
    family = family_of("mixtral")
    with pytest.raises(ValueError, match=r"has no router\.bias; it has experts\.down_proj"):
        family.from_transformers({**block_state("mixtral"), "router.bias": torch.zeros(E)})
    with pytest.raises(ValueError, match=r"a MoELayer .* has no gate\.bias"):
        family.to_transformers({"gate.bias": torch.zeros(E)})


SIZES = {"hidden_size": 64, "num_experts_per_tok": 4, "hidden_act": "silu"}


def config_of(model_type, **values):
    text = json.dumps({"model_type": model_type, **SIZES, **values})
    return family_of(model_type).config(json.loads(text))


def test_mixtral_normalises_and_takes_the_dense_width():
    config = config_of(
        "mixtral", num_local_experts=8, intermediate_size=96, router_jitter_noise=0.1
    )
    assert (config.num_experts, config.moe_intermediate_size) == (8, 96)
    assert config.router == RouterOptions(moe_input_jitter_eps=0.1)


def test_qwen2_moe_has_a_gated_shared_expert():
    config = config_of(
        "qwen2_moe",
        num_experts=60,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=100,
        router_aux_loss_coef=0.01,
    )
    assert not config.router.norm_topk_prob
    assert config.shared_expert == SharedExpertOptions(
        moe_shared_expert_intermediate_size=100, moe_shared_expert_gate=True
    )
    assert config.losses.router_aux_loss_coef == 0.01


def test_deepseek_v3_routes_by_biased_sigmoid_in_groups():
    config = config_of(
        "deepseek_v3",
        n_routed_experts=16,
        moe_intermediate_size=96,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        scoring_func="sigmoid",
        aux_loss_alpha=0.001,
        seq_aux=True,
    )
    assert config.router == RouterOptions(
        moe_router_score_function="sigmoid",
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        moe_router_group_score="top2_sum",
        moe_router_enable_expert_bias=True,
    )
    assert config.shared_expert == SharedExpertOptions(moe_shared_expert_intermediate_size=192)
    assert config.losses.moe_aux_loss_scope == "sequence"
    assert config.losses.router_aux_loss_coef == 0.001


def test_deepseek_v2_groups_only_when_asked():
    sizes = dict(n_routed_experts=16, moe_intermediate_size=96, n_group=4, topk_group=2)
    greedy = config_of("deepseek_v2", **sizes, topk_method="greedy")
    assert greedy.router.n_group == 1
    grouped = config_of("deepseek_v2", **sizes, topk_method="group_limited_greedy")
    assert (grouped.router.n_group, grouped.router.topk_group) == (4, 2)
    assert grouped.router.moe_router_group_score == "max"
    assert not grouped.router.norm_topk_prob
    none = config_of("deepseek_v2", **sizes, topk_method="greedy", n_shared_experts=0)
    assert none.shared_expert is None


def test_ernie_names_its_keys_in_its_own_way():
    config = family_of("ernie4_5_moe").config(
        {
            "hidden_size": 64,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 96,
            "moe_num_shared_experts": 2,
            "moe_norm_min": 1e-9,
        }
    )
    assert (config.num_experts, config.num_experts_per_tok) == (8, 3)
    assert config.router == RouterOptions(moe_norm_min=1e-9, moe_router_enable_expert_bias=True)
    sizes = {"hidden_size": 64, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 96}
    assert family_of("ernie4_5_moe").config(sizes).router.moe_norm_min == 1e-12


def test_gpt_oss_has_biases_and_a_clamped_activation():
    config = config_of("gpt_oss", num_local_experts=8, intermediate_size=96, swiglu_limit=5.0)
    assert config.experts == ExpertsOptions(swiglu_limit=5.0, has_bias=True)
    assert config.router == RouterOptions(
        moe_router_pre_softmax=False, norm_topk_prob=False, moe_router_bias=True
    )
    assert config.losses.router_aux_loss_coef == 0.0


DEEPSEEK = dict(n_routed_experts=16, moe_intermediate_size=96)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("mixtral", {"intermediate_size": 3}, "needs num_local_experts or num_experts"),
        ("mixtral", {"model_type": "qwen3_moe"}, r"family_of\('qwen3_moe'\)"),
        ("deepseek_v2", {**DEEPSEEK, "topk_method": "noaux_tc"}, "'noaux_tc' is unknown"),
        ("deepseek_v2", {**DEEPSEEK, "norm_topk_prob": True}, "never normalises"),
        ("deepseek_v2", {**DEEPSEEK, "scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek_v3", {**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v2", {**DEEPSEEK, "n_shared_experts": 1, "mlp_bias": True}, "mlp_bias=True"),
        ("gpt_oss", {"num_local_experts": 4}, "intermediate_size"),
    ],
)
def test_configurations_without_a_meaning_are_refused(model_type, values, message):
    with pytest.raises(ValueError, match=message):
        family_of(model_type).config({**SIZES, **values})


def test_unknown_family_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'deepseek_v3'"):
        family_of("deepseek_v4")

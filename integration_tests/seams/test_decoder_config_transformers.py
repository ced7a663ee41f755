"""Configurations as published for transformers 4 against what transformers 5 makes of them.

transformers reads each old file and writes it in its new spelling; both have to mean the same
decoder to us.
"""

from dataclasses import replace
from typing import Any

import pytest

from moe_train.model import DecoderConfig

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rope_theta": 12345.0,
    "rope_scaling": None,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "router_aux_loss_coef": 0.9,
}
MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
OLD: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": None, "rms_norm_eps": 1e-5},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 96,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "max_window_layers": 48,
    },
    "deepseek_v2": {
        **MLA,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": {
        **MLA,
        "q_lora_rank": 24,
        "first_k_dense_replace": 3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 4,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 4,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
}


# Keys whose lack means something else to us, as the changelog or their help says.
OURS = {
    "router_aux_loss_coef",
    "max_position_embeddings",
    "eos_token_id",
    "num_nextn_predict_layers",
}


def of(values: dict[str, Any]) -> DecoderConfig:
    return replace(DecoderConfig.from_dict(values), extra={})


@pytest.mark.parametrize("model_type", OLD)
def test_the_spelling_of_transformers_4_means_what_that_of_5_means(model_type: str) -> None:
    old = {**COMMON, **OLD[model_type], "model_type": model_type}
    read = transformers.AutoConfig.for_model(**old)
    new = read.to_dict()
    assert "rope_parameters" in new and not new.get("rope_scaling")
    assert of(old) == of(new)
    assert of(old) == of({**read.to_diff_dict(), "model_type": model_type})


@pytest.mark.parametrize("model_type", OLD)
def test_a_missing_key_means_what_transformers_takes_for_it_or_is_refused(model_type: str) -> None:
    whole = {**COMMON, **OLD[model_type], "model_type": model_type}
    # DeepSeek-V3's groups go together: eight cannot be left of one.
    dropped = [{key} for key in whole if key not in {*OURS, "model_type"}]
    dropped.append({"n_group", "topk_group", "routed_scaling_factor", "n_shared_experts"})
    refused = set()
    for keys in dropped:
        values = {key: value for key, value in whole.items() if key not in keys}
        try:
            ours = of(values)
        except ValueError as error:
            assert "missing" in str(error) or "needs" in str(error), (keys, error)
            refused |= keys
            continue
        assert ours == of(transformers.AutoConfig.for_model(**values).to_dict()), keys
    assert refused >= {"vocab_size", "hidden_size"} and len(refused) < len(whole) / 2, refused


@pytest.mark.parametrize("model_type", OLD)
def test_a_configuration_with_all_defaults_of_transformers_can_be_built(model_type: str) -> None:
    # What transformers itself leaves open, or gets wrong: 4096 over 96 heads is no whole number.
    more = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}
    values = transformers.AutoConfig.for_model(model_type).to_dict()
    config = of({**values, **more.get(model_type, {})})
    assert len(config.windows) == len(config.sparse_layers) == config.num_hidden_layers

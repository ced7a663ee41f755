"""Fixtures of the seams: seeds, threads, and a tiny model of every family of weight-convert."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranktest.fixtures import one_thread as one_thread
from ranktest.fixtures import seed as seed

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "intermediate_size": 24,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
GROUPED = {
    "n_routed_experts": 12,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": GROUPED | LATENT | {"n_shared_experts": 2},
    "deepseek_v3": GROUPED | LATENT | {"n_shared_experts": 1},
    "dots1": GROUPED | {"n_shared_experts": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 12,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_k": 2,
    },
    "glm4_moe": GROUPED
    | {"n_shared_experts": 1, "head_dim": 8, "use_qk_norm": True, "attention_bias": True},
    "gpt_oss": {"num_local_experts": 12, "head_dim": 8},
    "granitemoe": {"num_local_experts": 12},
    "jamba": {
        "num_experts": 12,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
    },
    "minimax_m2": {"num_local_experts": 12, "head_dim": 8},
    "mixtral": {"num_local_experts": 12},
    "olmoe": {"num_experts": 12},
    "phimoe": {"num_local_experts": 12},
    "qwen2_moe": {
        "num_experts": 12,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "num_experts": 12,
        "moe_intermediate_size": 20,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
    "qwen3_vl_moe": {
        "text_config": SIZES
        | {
            "num_experts": 12,
            "moe_intermediate_size": 20,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "mlp_only_layers": [0],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "patch_size": 4,
            "deepstack_visual_indexes": [0],
        },
    },
}


@pytest.fixture
def tiny_configs() -> dict[str, dict[str, Any]]:
    """Of every family, what makes its `config.json` one of a tiny model without square experts."""
    return {
        name: config if "text_config" in config else SIZES | config
        for name, config in CONFIGS.items()
    }


def auto_class(model_type: str) -> Any:
    """Transformers' class that makes and loads models of a family."""
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    if "vision_config" in CONFIGS[model_type]:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


@pytest.fixture
def make_model(
    tiny_configs: dict[str, dict[str, Any]],
) -> Callable[[str], tuple[int, Any]]:
    """A function that makes a tiny model of transformers of random weights, with its seed."""
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

    def make(model_type: str) -> tuple[int, Any]:
        seed = random.randrange(2**32)
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(model_type, **tiny_configs[model_type])
        return seed, auto_class(model_type).from_config(config).eval()

    return make

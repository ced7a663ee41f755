"""What `config.json` of a Mixture-of-Experts model says where that of a dense one is known.

model_type, changes = moe_config({"model_type": "qwen3", ...}, upcycling, width=768)

Values that a dense family leaves to its defaults are written out where the other's differ.
"""

from collections.abc import Mapping
from typing import Any

from weight_convert.errors import UnknownFamilyError, WeightConvertError

# Dense families, and the MoE one whose attention, norms and positions are theirs.
_FAMILIES: Mapping[str, str] = {"qwen3": "qwen3_moe", "mistral": "mixtral", "llama": "mixtral"}
# What a dense family means where its config.json is silent, and Mixtral or Qwen3-MoE another thing.
_SILENT: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    "mistral": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
}
_ROPE_THETA = 10000.0
_REFUSED = {
    "use_sliding_window": "windows of some layers",
    "attention_bias": "biases of attention",
    "mlp_bias": "biases of MLPs",
    "quantization_config": "quantised weights; dequantise it first",
}


def family_for(config: Mapping[str, Any]) -> str:
    """The MoE family that a dense model becomes one of.

    Raises:
        UnknownFamilyError: none is known.
        WeightConvertError: the model has what that family has not.
    """
    named = config.get("model_type")
    if not isinstance(named, str) or named not in _FAMILIES:
        raise UnknownFamilyError(
            f"config.json is of model_type {named!r}; known dense families: {', '.join(_FAMILIES)}"
        )
    for name, what in _REFUSED.items():
        if config.get(name):
            raise WeightConvertError(f"config.json has {name}={config[name]!r}: {what}")
    return _FAMILIES[named]


def moe_config(
    config: Mapping[str, Any], *, experts: int, chosen: int, width: int
) -> dict[str, Any]:
    """Entries to change.

    Args:
        config: of the dense model.
        experts, chosen: how many there are, and for each token.
        width: units of an expert.
    """
    dense = str(config["model_type"])
    changes: dict[str, Any] = {
        name: value for name, value in _SILENT[dense].items() if name not in config
    }
    if dense == "llama" and "num_key_value_heads" not in config:
        changes["num_key_value_heads"] = config.get("num_attention_heads", 32)
    if "rope_parameters" not in config and "rope_theta" not in config:
        changes["rope_theta"] = _ROPE_THETA
    changes["num_experts_per_tok"] = chosen
    if _FAMILIES[dense] == "mixtral":
        return changes | {"num_local_experts": experts, "intermediate_size": width}
    return changes | {
        "num_experts": experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "layer_types": None,
    }

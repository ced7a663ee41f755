import math

import pytest

from moe_train.model.config import DecoderConfig
from moe_train.model.families import ConfigReader, rules_of
from moe_train.model.rope_config import latent_softmax_scale, rope_parameters
from moe_train.model.rope_scaling import YarnScaling

VALUES = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
}


def test_yarn_reads_alike_in_both_spellings_and_infers_what_is_missing() -> None:
    yarn = {"factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
    old = {**VALUES, "rope_theta": 150.0, "rope_scaling": {**yarn, "type": "yarn"}}
    new = {**VALUES, "rope_parameters": {**yarn, "rope_type": "yarn", "rope_theta": 150.0}}
    rotary = DecoderConfig.from_dict(old).rotary
    assert rotary == DecoderConfig.from_dict(new).rotary
    assert rotary.scaling == YarnScaling(
        factor=8.0,
        original_max_position_embeddings=32,
        attention_factor=0.1 * math.log(8.0) + 1.0,
        truncate=False,
    )
    both = {**yarn, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "factor": None}
    inferred = DecoderConfig.from_dict(
        {**VALUES, "rope_scaling": both, "max_position_embeddings": 128}
    ).rotary.scaling
    assert inferred is not None
    assert (inferred.factor, inferred.attention_factor) == (4.0, 1.0)
    factor_only = {**VALUES, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    inferred = DecoderConfig.from_dict(
        {**factor_only, "max_position_embeddings": 512}
    ).rotary.scaling
    assert inferred is not None and inferred.original_max_position_embeddings == 512
    with pytest.raises(ValueError, match="missing max_position_embeddings"):
        DecoderConfig.from_dict(factor_only)


def test_latent_attention_infers_the_factor_of_yarn_too() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
    values = {"max_position_embeddings": 128, "rope_parameters": yarn}
    rope = rope_parameters(ConfigReader(values), rules_of("deepseek_v3"))
    assert latent_softmax_scale(rope, 16) == 0.25 * (0.1 * math.log(4.0) + 1) ** 2


def test_what_stands_outside_fills_gaps_and_the_family_fills_an_empty_file() -> None:
    rules = rules_of("glm4_moe")
    values = {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    assert rope_parameters(ConfigReader(values), rules)["rope_theta"] == 7.0
    values = {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 7.0}}
    assert rope_parameters(ConfigReader(values), rules)["partial_rotary_factor"] == 0.25
    assert rope_parameters(ConfigReader({}), rules_of("gpt_oss"))["rope_type"] == "yarn"
    rope = rope_parameters(ConfigReader({"rope_theta": 9.0}), rules_of("gpt_oss"))
    assert (rope["rope_type"], rope["rope_theta"]) == ("yarn", 9.0)
    given = ConfigReader({"rope_parameters": {"rope_theta": 9.0}})
    assert rope_parameters(given, rules_of("gpt_oss"))["rope_type"] == "default"


def test_yarn_sharpens_the_scores_of_latent_attention() -> None:
    yarn = {"rope_type": "yarn", "factor": math.e**10, "mscale_all_dim": 1.0}
    assert latent_softmax_scale(yarn, 16) == 0.25 * (0.1 * 10 + 1) ** 2
    assert latent_softmax_scale({"rope_type": "default", "mscale_all_dim": 1.0}, 16) == 0.25
    assert latent_softmax_scale({"rope_type": "yarn", "factor": 4.0}, 16) == 0.25

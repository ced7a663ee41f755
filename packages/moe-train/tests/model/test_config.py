import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_train.model.config import DecoderConfig, stage_layers
from moe_train.model.layers import AttentionOptions
from moe_train.model.rotary import RotaryOptions

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

MLA = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4)
ORIGINAL = {"original_max_position_embeddings": 32, "factor": 4.0}


def test_head_dim_defaults_to_hidden_over_heads() -> None:
    attention = DecoderConfig.from_dict(VALUES).attention
    assert isinstance(attention, AttentionOptions) and attention.head_dim == 8


def test_both_spellings_of_transformers_are_read() -> None:
    old = DecoderConfig.from_dict({**VALUES, "rope_theta": 5e5})
    renamed = {**VALUES, "num_local_experts": 4, "rope_parameters": {"rope_theta": 5e5}}
    del renamed["num_experts"]
    new = DecoderConfig.from_dict(renamed)
    assert (old.num_experts, old.rotary) == (new.num_experts, new.rotary)
    assert new.rotary == RotaryOptions(dim=8, theta=5e5)


def test_sparse_layers_follow_step_and_exceptions() -> None:
    config = DecoderConfig.from_dict({**VALUES, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [config.is_sparse(layer) for layer in range(4)] == [False, True, False, False]


def test_unknown_keys_survive_a_round_trip() -> None:
    config = DecoderConfig.from_dict({**VALUES, "my_note": [1, 2]})
    written = json.loads(config.to_json("bfloat16"))
    assert written["my_note"] == [1, 2]
    assert written["dtype"] == "bfloat16"
    assert DecoderConfig.from_dict(written).hidden_size == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtrl"}, "'mixtrl'.*did you mean 'mixtral'"),
        ({"num_experts_per_tok": 5}, "exceeds num_experts=4"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"use_sliding_window": True, "sliding_window": 0.5}, "sliding_window=0.5"),
        ({"model_type": "olmoe", "sliding_window": 4}, "sliding_window=4"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "names 1 layers"),
        ({"model_type": "gpt_oss", "layer_types": ["linear"] * 4}, "'linear'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ({"num_experts": None}, "num_experts"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "'qwen3_moe', which rotates whole heads"),
        ({"model_type": "glm4_moe", "partial_rotary_factor": 0.1}, "rotates 0 dims"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"model_type": "olmoe", "clip_qkv": "8"}, "clip_qkv='8'; expected a positive finite"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; expected a positive finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; expected true or false"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3; expected a list"),
        ({"model_type": "gpt_oss", "layer_types": 3}, "layer_types=3; expected a list"),
        ({"model_type": "glm4_moe", "first_k_dense_replace": "1"}, "replace='1'; expected an int"),
        ({"router_aux_loss_coef": "0"}, "router_aux_loss_coef='0'; expected a finite number"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id=.*expected an integer or a list"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6'; expected a positive finite number"),
        ({"rope_scaling": {"type": "yarn", **ORIGINAL, "factor": -1}}, "factor=-1; expected"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0, **ORIGINAL}}, "beta_fast=0; expected"),
        ({"model_type": "deepseek_v2", "rope_interleave": False}, "rope_interleave=False"),
        ({"model_type": "deepseek_v3", **MLA}, "missing q_lora_rank; add it, null for"),
        ({"attention_dropout": 1.0}, "attention_dropout=1.0; expected 0 up to 1"),
        (
            {"model_type": "ernie4_5_moe", "moe_k": 2, "attention_dropout": 0.1},
            "dropout=0.1; expected 0: this family",
        ),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 .* no such noise"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "proportional"}}, "proportional.*one of default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "missing factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], **ORIGINAL}},
            "short_factor=.*expected 4 pos",
        ),
        ({"head_dim": 7}, "even"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_value(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict({**VALUES, **change})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        DecoderConfig.from_file(tmp_path)


def test_what_the_file_leaves_open_is_what_transformers_takes() -> None:
    config = DecoderConfig.from_dict({**VALUES, "model_type": "gpt_oss", "sliding_window": 3})
    assert isinstance(config.attention, AttentionOptions)
    assert config.attention.head_dim == 64 and config.attention.o_bias
    assert config.rotary.theta == 150000.0 and config.rotary.scaling is not None
    assert config.rms_norm_eps == 1e-5
    assert DecoderConfig.from_dict({**VALUES, "model_type": "ernie4_5_moe"}).tie_word_embeddings


def test_layers_for_multi_token_prediction_can_be_left_out_of_the_file_too() -> None:
    values = {**VALUES, "model_type": "glm4_moe", "num_mtp_layers": 2}
    config = DecoderConfig.from_dict(values)
    assert list(config.mtp_layers) == [4, 5] and config.is_sparse(5) and config.window(5) is None
    without = config.with_mtp_layers(0)
    written = json.loads(without.to_json("float32"))
    assert written["num_nextn_predict_layers"] == 0 and "num_mtp_layers" not in written
    assert DecoderConfig.from_dict(written).num_nextn_predict_layers == 0


def test_every_token_that_ends_a_text_is_known() -> None:
    of = {
        given: DecoderConfig.from_dict({**VALUES, "eos_token_id": json.loads(given)})
        for given in ("[7, 9]", "7", "[]", "null", "0")
    }
    assert [c.eos_token_ids for c in of.values()] == [(7, 9), (7,), (), (), (0,)]
    assert [c.eos_token_id for c in of.values()] == [7, 7, None, None, 0]


def vision_file(folder: Path, **changes: object) -> Path:
    """The config.json of a model of text and images, as transformers 4 wrote it."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {**VALUES, "model_type": "qwen3_vl_moe_text", "rope_scaling": rope, **changes}
    values = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}
    path = folder / "config.json"
    path.write_text(json.dumps(values | {"tie_word_embeddings": True}))
    return path


def test_the_decoder_of_a_model_of_text_and_images_is_read_on_demand(tmp_path: Path) -> None:
    path = vision_file(tmp_path, tie_word_embeddings=False, rope_theta=5e6)
    config = DecoderConfig.from_file(path, of_text=True)
    alone = {**VALUES, "norm_topk_prob": True, "tie_word_embeddings": True, "rope_theta": 5e6}
    expected = DecoderConfig.from_dict({**alone, "max_position_embeddings": 128000})
    assert replace(config, extra={}) == replace(expected, extra={})
    assert config.unknown_keys() == []
    written = json.loads(config.to_json("bfloat16"))
    assert written["architectures"] == ["Qwen3MoeForCausalLM"]
    vision_file(tmp_path)
    assert DecoderConfig.from_file(path, of_text=True).rotary.theta == 5e5  # as transformers'
    with pytest.raises(ValueError, match=r"'qwen3_vl_moe'; .*model\.init_from trains the decoder"):
        DecoderConfig.from_file(path)
    path.write_text('{"model_type": "qwen3_vl_moe"}')
    with pytest.raises(ValueError, match=r"text_config=None; .* needs the object"):
        DecoderConfig.from_file(path, of_text=True)


def test_layers_that_do_not_divide_are_refused_with_the_choices() -> None:
    assert [list(stage_layers(6, 3, s)) for s in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"num_hidden_layers=6 .*pp=4.*1, 2, 3, 6"):
        stage_layers(6, 4, 0)

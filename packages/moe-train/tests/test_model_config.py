import json
from pathlib import Path

import pytest

from moe_train.model.config import Qwen3MoeConfig

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


def test_head_dim_defaults_to_hidden_over_heads() -> None:
    assert Qwen3MoeConfig.from_dict(VALUES).head_dim == 8


def test_both_spellings_of_transformers_are_read() -> None:
    old = Qwen3MoeConfig.from_dict({**VALUES, "rope_theta": 5e5})
    renamed = {**VALUES, "num_local_experts": 4, "rope_parameters": {"rope_theta": 5e5}}
    del renamed["num_experts"]
    new = Qwen3MoeConfig.from_dict(renamed)
    assert (old.num_experts, old.rope_theta) == (new.num_experts, new.rope_theta) == (4, 5e5)


def test_sparse_layers_follow_step_and_exceptions() -> None:
    config = Qwen3MoeConfig.from_dict({**VALUES, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [config.is_sparse(layer) for layer in range(4)] == [False, True, False, False]


def test_unknown_keys_survive_a_round_trip() -> None:
    config = Qwen3MoeConfig.from_dict({**VALUES, "my_note": [1, 2]})
    written = json.loads(config.to_json("bfloat16"))
    assert written["my_note"] == [1, 2]
    assert written["dtype"] == "bfloat16"
    assert Qwen3MoeConfig.from_dict(written).hidden_size == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"num_experts_per_tok": 5}, "exceeds num_experts=4"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_value(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3MoeConfig.from_dict({**VALUES, **change})


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        Qwen3MoeConfig.from_file(tmp_path)

import pytest

from weight_convert.errors import WeightConvertError
from weight_convert.merging import Slice
from weight_convert.merging.layers_config import stacked_config

SLICES = (Slice(path="a", begin=0, end=2), Slice(path="b", begin=1, end=3))


def changed(a: dict, b: dict | None = None) -> dict:
    return stacked_config(
        SLICES, [{"num_hidden_layers": 3, **c} for c in (a, a if b is None else b)]
    )


def test_lists_with_an_entry_for_each_layer_are_stacked_with_the_layers() -> None:
    a = {"layer_types": ["sliding", "full", "sliding"], "mlp_only_layers": [0], "x": [1, 2, 3]}
    b = {"layer_types": ["s", "f", "g"], "mlp_only_layers": [2]}
    assert changed(a, b) == {
        "num_hidden_layers": 4,
        "layer_types": ["sliding", "full", "f", "g"],
        "mlp_only_layers": [0, 3],
    }
    assert changed({"layer_types": None, "mlp_only_layers": []}) == {
        "num_hidden_layers": 4,
        "mlp_only_layers": [],
    }
    with pytest.raises(WeightConvertError, match=r"layer_types in config\.json of b is None"):
        changed(a, {})


def test_a_decoder_that_an_entry_describes_has_its_number_of_layers_there() -> None:
    inner = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "rope_theta": 7}
    config = {"text_config": inner, "model_type": "qwen3_vl_moe"}
    assert stacked_config(SLICES, [config, config]) == {
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["a", "b", "b", "c"],
            "rope_theta": 7,
        }
    }


@pytest.mark.parametrize(
    "config",
    [
        {"first_k_dense_replace": 2},
        {"decoder_sparse_step": 2},
        {"moe_layer_freq": 2},
        {"expert_layer_period": 2, "expert_layer_offset": 1},
        {"attn_layer_period": 3, "attn_layer_offset": 1},
        {"moe_layer_start_index": 2},
        {"moe_layer_end_index": 1},
    ],
)
def test_a_layer_that_its_new_number_would_make_another_kind_of_is_refused(config) -> None:
    name = next(iter(config))
    with pytest.raises(WeightConvertError, match=f"another kind there: {name} is"):
        changed(config)


def test_rules_that_say_the_same_of_each_layer_are_left_as_they_are() -> None:
    config = {
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
    }
    assert changed(config) == {"num_hidden_layers": 4}
    assert changed({"moe_layer_end_index": 2})["moe_layer_end_index"] == 3

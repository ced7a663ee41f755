import pytest

from moe_pipeline.config import MoEConfig

GOOD = dict(hidden_size=8, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2)


def test_config_keeps_its_values_and_is_frozen():
    config = MoEConfig(**GOOD)
    assert (config.hidden_size, config.experts_implementation) == (8, "auto")
    with pytest.raises(AttributeError):
        config.hidden_size = 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"hidden_size": -3}, "hidden_size must be at least 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 exceeds num_experts=4"),
        ({"router_aux_loss_coef": -0.1}, "must be finite and not negative"),
        ({"router_aux_loss_coef": float("nan")}, "must be finite and not negative"),
        ({"initializer_range": -1.0}, "must be finite and not negative"),
        ({"moe_aux_loss_scope": "global_batch"}, "is not offered"),
        ({"moe_aux_loss_scope": "token"}, "choose one of micro_batch, sequence"),
        ({"experts_implementation": "fast"}, "choose one of auto, fused, grouped_mm, loop"),
    ],
)
def test_config_refuses_what_no_layer_can_have(change, words):
    with pytest.raises(ValueError, match=words):
        MoEConfig(**{**GOOD, **change})


@pytest.mark.parametrize("value", [2.0, True, "8"])
def test_config_refuses_sizes_that_are_not_integers(value):
    with pytest.raises(TypeError, match="num_experts must be an int"):
        MoEConfig(**{**GOOD, "num_experts": value})

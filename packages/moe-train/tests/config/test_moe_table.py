import pytest

from moe_train.config.moe_table import FROM_MODEL, MoeTable
from moe_train.config.tables import Config, ModelConfig, OptimizerConfig, TrainConfig
from moe_train.config.toml_file import dump_toml, keys_help


def test_the_defaults_are_the_models_loss_without_capacity() -> None:
    table = MoeTable()
    assert table.moe_aux_loss_coeff == FROM_MODEL
    assert table.capacity_factor is None
    assert MoeTable(moe_expert_capacity_factor=1.5).capacity_factor == 1.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_aux_loss_coeff", -0.5),
        ("moe_aux_loss_coeff", -2.0),
        ("moe_z_loss_coeff", -1.0),
        ("moe_expert_capacity_factor", -1.0),
        ("moe_expert_capacity_factor", float("inf")),
        ("moe_router_bias_update_rate", 0.0),
        ("moe_token_drop_policy", "random"),
        ("moe_router_load_balancing_scope", "batch"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"moe.{name}"):
        MoeTable(**{name: value})  # type: ignore[arg-type]


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="moe_router_enable_expert_bias must be bool"):
        MoeTable(moe_router_enable_expert_bias="yes")  # type: ignore[arg-type]


def test_the_table_is_written_and_described() -> None:
    config = Config(
        model=ModelConfig(config_file="config.json"),
        train=TrainConfig(output_dir="out", max_steps=1, global_batch_size=1),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    text = dump_toml(config)
    assert "[moe]\n" in text and "moe_aux_loss_coeff = -1.0" in text
    assert "moe_router_load_balancing_scope" in keys_help()

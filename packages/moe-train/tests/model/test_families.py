import pytest

from moe_pipeline.families.catalog import FAMILIES
from moe_train.model.config import DecoderConfig
from moe_train.model.families import RULES, ConfigReader, rules_of

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


def test_windows_follow_the_rules_of_each_family() -> None:
    def windows(**changes: object) -> tuple[int | None, ...]:
        return DecoderConfig.from_dict({**VALUES, "sliding_window": 7, **changes}).windows

    assert windows() == (None,) * 4
    assert windows(use_sliding_window=True) == (7,) * 4
    assert windows(model_type="mixtral") == (7,) * 4
    assert windows(model_type="gpt_oss") == (7, None, 7, None)
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(model_type="gpt_oss", layer_types=types) == (None, 7, None, 7)
    qwen2 = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 8}
    assert windows(**qwen2) == (None,) * 4
    assert windows(**qwen2, use_sliding_window=True, max_window_layers=2) == (7, None, None, None)


def test_dense_layers_follow_the_rules_of_each_family() -> None:
    def sparse(**changes: object) -> str:
        config = DecoderConfig.from_dict({**VALUES, **changes})
        return "".join("x" if config.is_sparse(layer) else "-" for layer in range(4))

    assert sparse(model_type="glm4_moe", first_k_dense_replace=3) == "---x"
    assert sparse(model_type="glm4_moe") == "-xxx"
    assert sparse(model_type="ernie4_5_moe", moe_layer_interval=2) == "-x-x"
    assert sparse(model_type="ernie4_5_moe", moe_layer_end_index=1) == "-x--"
    assert sparse(model_type="mixtral", decoder_sparse_step=2) == "xxxx"


def test_a_reader_names_what_is_missing_and_skips_null() -> None:
    read = ConfigReader({"a": None, "b": 3, "flag": True})
    assert read.get("a", "b") == 3 and read.get("a", default=5) == 5
    assert read.size("a", "b") == 3
    with pytest.raises(ValueError, match="missing a or c; add it"):
        read.need("a", "c")
    with pytest.raises(ValueError, match="flag=True; expected a positive integer"):
        read.size("flag")


def test_every_family_is_known_to_the_layers_of_experts_too() -> None:
    assert RULES.keys() == FAMILIES.keys()
    with pytest.raises(ValueError, match=r"'olmo'.*did you mean 'olmoe'"):
        rules_of("olmo")

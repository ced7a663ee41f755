import re
from pathlib import Path
from typing import Any

import pytest

from weight_convert import inspect, split
from weight_convert.cutting import SplitLayout
from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import read_catalog
from weight_convert.plan import plan_conversion
from weight_convert.specs import get_spec

SPEC = get_spec("qwen3_moe")
E1 = "model.layers.1.mlp.experts"


def refusal(oracle: Any, folder: Path, tensors: Any, config: Any, to: str = "fused") -> str:
    oracle.write_folder(folder, [tensors], config)
    with pytest.raises(IncompleteExpertsError) as caught:
        plan_conversion(read_catalog(folder), SPEC, to=to)
    return str(caught.value)


def test_a_missing_expert_is_named(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = dict(model.per_expert)
    del tensors[f"{E1}.10.up_proj.weight"]
    del tensors[f"{E1}.3.up_proj.weight"]
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert f"like {E1}.0.gate_proj.weight: expected experts 0 to 11 (num_experts of" in said
    assert "{expert}.up_proj.weight" in said
    assert "missing 3, 10, unexpected none" in said


def test_a_missing_last_expert_is_noticed_with_a_config(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = {key: value for key, value in model.per_expert.items() if ".experts.11." not in key}
    assert "missing 11" in refusal(oracle, tmp_path / "m", tensors, {"num_local_experts": 12})


def test_a_missing_last_part_is_noticed_without_a_config(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = dict(model.per_expert)
    del tensors[f"{E1}.11.down_proj.weight"]
    assert "missing 11" in refusal(oracle, tmp_path / "m", tensors, {})


@pytest.mark.parametrize("to", ["fused", "transformers"])
def test_a_whole_missing_projection_is_noticed(
    oracle: Any, model: Any, tmp_path: Path, to: str
) -> None:
    tensors = {key: value for key, value in model.fused.items() if "gate_up" not in key}
    said = refusal(oracle, tmp_path / "m", tensors, model.config, to)
    assert f"{E1}.gate_up_proj is missing, expected experts 0 to 11" in said


def test_a_router_without_experts_is_noticed(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=3)
    tensors = {
        k: v for k, v in model.per_expert.items() if not k.startswith("model.layers.2.mlp.e")
    }
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert "model.layers.2.mlp.experts.down_proj is missing" in said


def test_more_experts_than_the_config_allows_are_refused(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    said = refusal(oracle, tmp_path / "m", model.per_expert, {"num_experts": 8})
    assert "missing none, unexpected 8, 9, 10, 11" in said
    said = refusal(oracle, tmp_path / "n", model.fused, {"num_experts": 8})
    assert "expected 8 experts (num_experts of config.json)" in said


def test_an_absurd_expert_number_is_refused_at_once(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = dict(model.per_expert)
    tensors[f"{E1}.{10**15}.up_proj.weight"] = tensors[f"{E1}.0.up_proj.weight"]
    assert "more, unexpected none" in refusal(oracle, tmp_path / "m", tensors, {})


def test_an_expert_of_another_shape_or_dtype_is_refused(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    key = f"{E1}.10.gate_proj.weight"
    data = model.per_expert[key][2]
    cases = [("BF16", (10, 6), data), ("F16", (6, 10), data), ("BF16", (60,), data)]
    for number, value in enumerate(cases):
        tensors = model.per_expert | {key: value}
        said = refusal(oracle, tmp_path / str(number), tensors, model.config)
        assert said.startswith(f"{key} is {value[0]}")
        assert "BF16 [6, 10]" in said


def test_a_dense_model_is_refused(oracle: Any, tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_proj.weight": ("U8", (1, 1), b"x")}
    said = refusal(oracle, tmp_path / "m", tensors, {})
    assert "has no expert tensor of family qwen3_moe" in said


def test_block_scales_must_be_there_and_end_where_parts_end(oracle: Any, tmp_path: Path) -> None:
    block = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    model = oracle.make_model(h=8, d=12, dtype="F8_E4M3")
    said = refusal(oracle, tmp_path / "a", model.per_expert, model.config | block)
    assert "_proj_scale_inv is missing" in said

    def scales(of: Any) -> dict[str, Any]:
        return {
            f"{key}_scale_inv": (
                "F32",
                tuple(-(-n // 4) for n in shape),
                bytes(4 * -(-shape[0] // 4) * -(-shape[1] // 4)),
            )
            for key, (_, shape, _) in of.per_expert.items()
            if ".experts." in key
        }

    whole = model.per_expert | scales(model)
    oracle.write_folder(tmp_path / "b", [whole], model.config | block)
    assert plan_conversion(read_catalog(tmp_path / "b"), SPEC, to="fused").num_regrouped == 4
    missing = {
        key: v for key, v in whole.items() if not key.endswith(".7.up_proj.weight_scale_inv")
    }
    assert "missing 7" in refusal(oracle, tmp_path / "c", missing, model.config | block)

    uneven = oracle.make_model(h=6, d=12, dtype="F8_E4M3")  # 2 blocks a part, 3 for both
    said = refusal(oracle, tmp_path / "d", uneven.per_expert | scales(uneven), model.config | block)
    assert "gate_up_proj_scale_inv has shape [12, 4, 3], expected [12, 3, 3]" in said
    assert "cannot be fused; dequantise them first" in said


@pytest.mark.parametrize("block", [[128], [128] * 3, [0, 0], ["a", "b"], 128, "128", [-1, 128]])
def test_a_block_that_is_no_rows_and_columns_is_named(
    oracle: Any, tmp_path: Path, block: Any
) -> None:
    model = oracle.make_model(dtype="F8_E4M3")
    entry = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    oracle.write_folder(tmp_path / "m", [model.per_expert], model.config | entry)
    for call in (
        lambda: plan_conversion(read_catalog(tmp_path / "m"), SPEC, to="fused"),
        lambda: split(tmp_path / "m", tmp_path / "out", SplitLayout(tp=2)),
    ):
        with pytest.raises(WeightConvertError, match=f"weight_block_size {re.escape(repr(block))}"):
            call()
    assert "expected rows and columns of a block" in inspect(tmp_path / "m").problem

from pathlib import Path
from typing import Any

import pytest

from weight_convert.catalog import Catalog, read_catalog
from weight_convert.errors import IncompleteExpertsError
from weight_convert.families import get_spec
from weight_convert.regroup import (
    check_experts,
    fuse_experts,
    natural_key,
    split_experts,
    unmapped_expert_keys,
)

SPEC = get_spec("qwen3_moe")
E1 = "model.layers.1.mlp.experts"


def catalog_of(oracle: Any, folder: Path, tensors: Any, config: Any) -> Catalog:
    oracle.write_folder(folder, [tensors], config)
    return read_catalog(folder)


def refusal(oracle: Any, folder: Path, tensors: Any, config: Any) -> str:
    with pytest.raises(IncompleteExpertsError) as caught:
        check_experts(catalog_of(oracle, folder, tensors, config), SPEC)
    return str(caught.value)


@pytest.mark.parametrize("form", ["per_expert", "fused"])
@pytest.mark.parametrize("to", ["per_expert", "fused"])
def test_pieces_join_to_the_tensors_that_numpy_makes(
    model: Any, tmp_path: Path, form: str, to: str
) -> None:
    catalog = read_catalog(model.write(tmp_path / "m", form, num_files=3))
    check_experts(catalog, SPEC)
    contents = [(catalog.directory / name).read_bytes() for name in catalog.files]
    regroup = fuse_experts if to == "fused" else split_experts
    found = {
        t.key: (
            t.dtype,
            t.shape,
            b"".join(
                contents[p.file][p.offset_bytes : p.offset_bytes + p.size_bytes] for p in t.pieces
            ),
        )
        for t in regroup(catalog, SPEC)
    }
    assert found == (model.fused if to == "fused" else model.per_expert), model.seed


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["a.10.b", "a.2.b", "a.b", "a.b12", "a.b3", "10", "9", "a"]
    expected = ["9", "10", "a", "a.2.b", "a.10.b", "a.b", "a.b3", "a.b12"]
    assert sorted(names, key=natural_key) == expected


def test_a_name_of_thousands_of_digits_is_carried(oracle: Any, model: Any, tmp_path: Path) -> None:
    key = f"{E1}.{'9' * 5000}.up_proj.weight"
    catalog = catalog_of(oracle, tmp_path / "m", model.fused | {key: ("U8", (), b"x")}, {})
    check_experts(catalog, SPEC)
    assert sorted(natural_key(t.key) for t in split_experts(catalog, SPEC))
    assert unmapped_expert_keys(catalog, SPEC) == []


def test_a_missing_expert_is_named(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = dict(model.per_expert)
    del tensors[f"{E1}.10.up_proj.weight"]
    del tensors[f"{E1}.3.up_proj.weight"]
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert f"{E1}.*.up_proj.weight: expected experts 0 to 11 (num_experts of config.json)" in said
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


def test_a_whole_missing_projection_is_noticed(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = {key: value for key, value in model.fused.items() if "gate_up" not in key}
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert "missing 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in said


def test_a_router_without_experts_is_noticed(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=3)
    tensors = {
        k: v for k, v in model.per_expert.items() if not k.startswith("model.layers.2.mlp.e")
    }
    assert "model.layers.2.mlp.experts.*" in refusal(oracle, tmp_path / "m", tensors, model.config)


def test_more_experts_than_the_config_allows_are_refused(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    said = refusal(oracle, tmp_path / "m", model.per_expert, {"num_experts": 8})
    assert "missing none, unexpected 8, 9, 10, 11" in said
    said = refusal(oracle, tmp_path / "n", model.fused, {"num_experts": 8})
    assert "has 12 experts, expected 8 (num_experts of config.json)" in said


def test_an_absurd_expert_number_is_refused_at_once(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = dict(model.per_expert)
    tensors[f"{E1}.{10**15}.up_proj.weight"] = tensors[f"{E1}.0.up_proj.weight"]
    assert "and 999999999999981 more" in refusal(oracle, tmp_path / "m", tensors, {})


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


def test_experts_in_both_forms_are_refused(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = model.per_expert | model.fused
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert "stored both fused and per expert" in said
    with pytest.raises(IncompleteExpertsError, match="both fused and per expert"):
        split_experts(read_catalog(tmp_path / "m"), SPEC)
    with pytest.raises(IncompleteExpertsError, match="both fused and per expert"):
        fuse_experts(read_catalog(tmp_path / "m"), SPEC)


def test_a_fused_tensor_with_odd_rows_is_refused(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = model.fused | {f"{E1}.gate_up_proj": ("U8", (12, 3, 2), bytes(72))}
    said = refusal(oracle, tmp_path / "m", tensors, model.config)
    assert "gate_up_proj has shape [12, 3, 2]" in said
    with pytest.raises(IncompleteExpertsError, match="gate_up_proj has shape"):
        split_experts(read_catalog(tmp_path / "m"), SPEC)


def test_half_bytes_cannot_be_split_between_experts(
    oracle: Any, model: Any, tmp_path: Path
) -> None:
    tensors = model.fused | {f"{E1}.gate_up_proj": ("F4", (12, 2, 3), bytes(36))}
    catalog = catalog_of(oracle, tmp_path / "m", tensors, model.config)
    with pytest.raises(IncompleteExpertsError, match=r"cannot be split: F4 .* whole bytes"):
        split_experts(catalog, SPEC)


def test_a_dense_model_is_refused(oracle: Any, tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_proj.weight": ("U8", (1, 1), b"x")}
    said = refusal(oracle, tmp_path / "m", tensors, {})
    assert "has no expert tensor of family qwen3_moe" in said


def test_layers_may_differ_in_form(oracle: Any, tmp_path: Path) -> None:
    model = oracle.make_model(num_layers=3)
    tensors = {k: v for k, v in model.per_expert.items() if "layers.2.mlp.experts" not in k}
    tensors |= {k: v for k, v in model.fused.items() if "layers.2.mlp.experts" in k}
    catalog = catalog_of(oracle, tmp_path / "m", tensors, model.config)
    check_experts(catalog, SPEC)
    assert {t.key for t in fuse_experts(catalog, SPEC)} == set(model.fused)
    assert {t.key for t in split_experts(catalog, SPEC)} == set(model.per_expert)


def test_scales_are_listed_in_natural_order(oracle: Any, model: Any, tmp_path: Path) -> None:
    scales = [f"{E1}.{e}.gate_proj.weight_scale_inv" for e in (2, 10)]
    tensors = model.per_expert | {key: ("U8", (1,), b"x") for key in reversed(scales)}
    catalog = catalog_of(oracle, tmp_path / "m", tensors, model.config)
    check_experts(catalog, SPEC)
    assert unmapped_expert_keys(catalog, SPEC) == scales

from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import UnknownFamilyError
from weight_convert.families import get_spec
from weight_convert.inspection import inspect


@pytest.mark.parametrize("form", ["per_expert", "fused"])
def test_a_directory_is_summarised(oracle: Any, tmp_path: Path, form: str) -> None:
    model = oracle.make_model(num_layers=4)
    tensors = model.per_expert if form == "per_expert" else model.fused
    summary = inspect(model.write(tmp_path / "m", form, num_files=3))
    assert (summary.model_type, summary.form) == ("qwen3_moe", form)
    assert (summary.num_moe_layers, summary.num_experts) == (3, 12)
    assert (summary.num_files, summary.num_tensors) == (3, len(tensors))
    assert summary.data_bytes == sum(len(data) for _, _, data in tensors.values())
    expected: dict[str, int] = {}
    for dtype, _, data in tensors.values():
        expected[dtype] = expected.get(dtype, 0) + len(data)
    assert summary.bytes_by_dtype == expected
    assert (summary.num_unmapped, summary.problem) == (0, "")


def test_both_forms_in_one_directory_are_mixed(oracle: Any, model: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [model.per_expert | model.fused], model.config)
    summary = inspect(tmp_path / "m")
    assert summary.form == "mixed"
    assert "both fused and per expert" in summary.problem


def test_what_would_stop_a_conversion_is_told(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = {key: value for key, value in model.per_expert.items() if ".experts.4." not in key}
    tensors["model.layers.1.mlp.experts.0.up_proj.scale"] = ("U8", (), b"x")
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    summary = inspect(tmp_path / "m")
    assert "missing 4" in summary.problem
    assert summary.num_unmapped == 1


def test_a_model_without_experts_has_no_form(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": ("U8", (), b"x")}], {})
    with pytest.raises(UnknownFamilyError):
        inspect(tmp_path / "m")
    summary = inspect(tmp_path / "m", spec=get_spec("qwen3_moe"))
    assert (summary.form, summary.num_moe_layers, summary.num_experts) == ("none", 0, 0)
    assert "has no expert tensor" in summary.problem

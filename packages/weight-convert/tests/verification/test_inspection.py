from pathlib import Path
from typing import Any

import pytest

from weight_convert import inspect
from weight_convert.specs import get_spec


@pytest.mark.parametrize("form", ["transformers", "fused"])
def test_a_directory_is_summarised(oracle: Any, tmp_path: Path, form: str) -> None:
    model = oracle.make_model(num_layers=4)
    tensors = model.per_expert if form == "transformers" else model.fused
    summary = inspect(model.write(tmp_path / "m", form, num_files=3))
    assert (summary.model_type, summary.format) == ("qwen3_moe", form)
    assert (summary.num_moe_layers, summary.num_experts) == (3, 12)
    assert (summary.num_files, summary.num_tensors) == (3, len(tensors))
    assert summary.data_bytes == sum(len(data) for _, _, data in tensors.values())
    expected: dict[str, int] = {}
    for dtype, _, data in tensors.values():
        expected[dtype] = expected.get(dtype, 0) + len(data)
    assert summary.bytes_by_dtype == expected
    assert summary.problem == ""


def test_both_forms_in_one_directory_are_a_problem(oracle: Any, model: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [model.per_expert | model.fused], model.config)
    summary = inspect(tmp_path / "m")
    assert "stored in two forms, such as fused and per expert" in summary.problem


def test_what_would_stop_a_conversion_is_told(oracle: Any, model: Any, tmp_path: Path) -> None:
    tensors = {key: value for key, value in model.per_expert.items() if ".experts.4." not in key}
    oracle.write_folder(tmp_path / "m", [tensors], model.config)
    summary = inspect(tmp_path / "m")
    assert "missing 4" in summary.problem


def test_a_directory_of_an_unknown_family_is_listed(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": ("U8", (), b"x")}], {"model_type": "gpt2"})
    summary = inspect(tmp_path / "m")
    assert (summary.model_type, summary.format, summary.data_bytes) == ("", "", 1)
    assert "no family spec for model_type 'gpt2'" in summary.problem


def test_a_model_without_experts_is_a_problem(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": ("U8", (), b"x")}], {})
    summary = inspect(tmp_path / "m", spec=get_spec("qwen3_moe"))
    assert (summary.num_moe_layers, summary.num_experts) == (0, 0)
    assert "has no expert tensor" in summary.problem

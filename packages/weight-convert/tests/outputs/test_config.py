import json
from pathlib import Path
from typing import Any

from weight_convert.files import read_catalog
from weight_convert.outputs import with_config


def test_a_changed_entry_is_written_and_a_former_name_goes(oracle: Any, tmp_path: Path) -> None:
    config = {"model_type": "x", "torch_dtype": "float32", "quantization_config": {"a": 1}}
    oracle.write_folder(tmp_path / "a", [{"a": ("U8", (1,), b"a")}], config)
    changes = {"dtype": "bfloat16", "quantization_config": None}
    carried, written = with_config(read_catalog(tmp_path / "a"), changes)
    assert "config.json" not in dict(carried)
    assert json.loads(dict(written)["config.json"]) == {"model_type": "x", "dtype": "bfloat16"}


def test_a_part_of_the_model_has_the_new_dtype_too(oracle: Any, tmp_path: Path) -> None:
    parts = {"text_config": {"torch_dtype": "float32", "x": 1}, "vision_config": {"depth": 2}}
    oracle.write_folder(tmp_path / "a", [{"a": ("U8", (1,), b"a")}], parts)
    _, written = with_config(read_catalog(tmp_path / "a"), {"dtype": "bfloat16"})
    assert json.loads(dict(written)["config.json"]) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "x": 1},
        "vision_config": {"depth": 2},
    }


def test_a_directory_without_a_config_gets_none(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "a", [{"a": ("U8", (1,), b"a")}], {})
    (tmp_path / "a" / "config.json").unlink()
    carried, written = with_config(read_catalog(tmp_path / "a"), {"dtype": "bfloat16"})
    assert "config.json" not in dict(carried) and written == ()

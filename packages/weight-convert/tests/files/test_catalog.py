import json
from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files.catalog import read_catalog

A = ("U8", (4,), b"abcd")
INDEX = "model.safetensors.index.json"


def test_every_tensor_is_found_where_its_bytes_are(oracle: Any, model: Any, tmp_path: Path) -> None:
    folder = model.write(tmp_path / "m", "transformers", num_files=4)
    catalog = read_catalog(folder)
    for key, (dtype, shape, data) in model.per_expert.items():
        tensor = catalog.tensors[key]
        content = (folder / catalog.files[tensor.file]).read_bytes()
        found = content[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert (tensor.dtype, tensor.shape, found) == (dtype, shape, data), model.seed
    assert len(catalog.tensors) == len(model.per_expert)
    assert catalog.config["num_experts"] == 12
    assert catalog.metadata == {"format": "pt"}


def test_links_into_a_download_cache_are_followed(oracle: Any, model: Any, tmp_path: Path) -> None:
    real = model.write(tmp_path / "blobs", "transformers")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in real.iterdir():
        (folder / path.name).symlink_to(path)
    catalog = read_catalog(folder)
    assert len(catalog.tensors) == len(model.per_expert)
    assert [name for name, _ in catalog.carried] == ["config.json", "tokenizer.json"]


def test_other_files_are_carried_and_the_exceptions_are_named(oracle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    oracle.write_folder(folder, [{"a": A}], {})
    (folder / "empty.txt").touch()
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tool.jinja").write_text("x")
    (folder / "extra.safetensors").write_bytes(b"anything")
    (folder / "pytorch_model.bin.index.json").touch()
    (folder / "optimizer.safetensors").touch()
    (folder / "random_state-00000.json").touch()
    (folder / "manifest.json").write_text("{}")
    (folder / ".gitattributes").touch()
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").touch()
    (folder / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(folder / "nowhere")
    catalog = read_catalog(folder)
    assert dict(catalog.carried) == {
        "config.json": 2,
        "tokenizer.json": (folder / "tokenizer.json").stat().st_size,
        "empty.txt": 0,
        "chat_templates/tool.jinja": 1,
    }
    assert {item.name for item in catalog.left_out} == {
        "manifest.json",
        "extra.safetensors",
        "pytorch_model.bin.index.json",
        "optimizer.safetensors",
        "random_state-00000.json",
        ".gitattributes",
        "checkpoint-5",
        "loop",
        "broken",
    }


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(WeightConvertError, match=r"\(model\.safetensors, .*it holds: weights"):
        read_catalog(tmp_path)
    with pytest.raises(WeightConvertError, match="is not a directory"):
        read_catalog(tmp_path / "absent")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"metadata": [], "weight_map": {"a": "model.safetensors"}}, "metadata is not an object"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not a file name"),
        ({"weight_map": {"a": 3}}, "not a file name"),
        ({"weight_map": {"a": "gone.safetensors"}}, "two sets of weights"),
        ({"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}, "gone.* is missing"),
        ({"weight_map": {"b": "model.safetensors"}}, "says b is in .*no file has it"),
    ],
)
def test_an_index_that_lies_is_refused(
    oracle: Any, tmp_path: Path, index: object, said: str
) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": A}], {})
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "m" / INDEX).write_text(text)
    with pytest.raises(WeightConvertError, match=said):
        read_catalog(tmp_path / "m")


def test_an_index_that_points_to_the_wrong_file_is_refused(oracle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    oracle.write_folder(folder, [{"a": A}, {"b": A}], {})
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"b": "model-00002', '"b": "model-00001'))
    # the second file is not named any more, so its tensor is nowhere
    with pytest.raises(CorruptFileError, match=r"says b is in model-00001.*no file has it"):
        read_catalog(folder)


def test_a_tensor_that_the_index_forgot_is_still_found(oracle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    oracle.write_folder(folder, [{"a": A, "forgotten": A}, {"b": A}], {})
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["forgotten"]
    (folder / INDEX).write_text(json.dumps(index))
    assert set(read_catalog(folder).tensors) == {"a", "b", "forgotten"}


def test_a_tensor_in_two_files_is_refused(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": A, "b": A}, {"b": A}], {})
    with pytest.raises(CorruptFileError, match=r"b is stored in both model-00001.*model-00002"):
        read_catalog(tmp_path / "m")


def test_metadata_that_contradict_each_other_are_refused(oracle: Any, tmp_path: Path) -> None:
    oracle.write_folder(tmp_path / "m", [{"a": A}, {"b": A}], {})
    oracle.write_file(
        tmp_path / "m" / "model-00002-of-00002.safetensors", {"b": A}, {"format": "x"}
    )
    with pytest.raises(WeightConvertError, match="metadata 'format' is 'x', but 'pt'"):
        read_catalog(tmp_path / "m")

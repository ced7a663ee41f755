import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from moe_train.reading.arrays import check_ids, open_array
from moe_train.reading.formats import DataFile

Make = Callable[[Path, str], DataFile]


def write_megatron(path: Path, documents: list[list[int]], dtype: Any = np.uint16) -> None:
    """As Megatron's IndexedDatasetBuilder writes it: one sequence a document."""
    code = {np.uint8: 1, np.int32: 4, np.uint16: 8}[dtype]
    lengths = [len(document) for document in documents]
    path.write_bytes(np.concatenate([np.array(d, dtype) for d in documents]).tobytes())
    item = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * item
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, np.int32).tobytes() + pointers.astype(np.int64).tobytes()
    index += np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_raw_numbers_are_of_the_given_type(tmp_path: Path, data_file: Make, dtype: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(50, dtype=dtype).tobytes())
    array = open_array(data_file(path, "bin"), dtype)
    assert (array.ids.tolist(), array.trained, array.borders) == (list(range(50)), None, None)
    if dtype != "uint8":
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(ValueError, match=r'no whole number of .* tokens .*set "dtype"'):
            open_array(data_file(path, "bin"), dtype)


@pytest.mark.parametrize(
    "values", [np.arange(6, dtype=np.uint16), np.arange(6).reshape(2, 3), np.ones((2, 2, 2), int)]
)
def test_npy_is_a_line_of_tokens_or_rows(
    tmp_path: Path, data_file: Make, values: NDArray[Any]
) -> None:
    path = tmp_path / "a.npy"
    np.save(path, values)
    if values.ndim == 3:
        with pytest.raises(ValueError, match=r"shape \[2, 2, 2\], expected whole numbers of shape"):
            open_array(data_file(path, "npy"), "")
        return
    array = open_array(data_file(path, "npy"), "")
    assert array.ids.tolist() == list(range(6))
    assert (None if array.borders is None else array.borders.tolist()) == (
        None if values.ndim == 1 else [0, 3, 6]
    )


def test_other_npy_files_are_refused(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.ones(3))
    with pytest.raises(ValueError, match="holds float64"):
        open_array(data_file(path, "npy"), "")
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"is not a whole \.npy file"):
        open_array(data_file(path, "npy"), "")


@pytest.mark.parametrize("library", [save_file, save_torch])
def test_safetensors_are_mapped_as_the_library_reads_them(
    tmp_path: Path, data_file: Make, library: Any
) -> None:
    path = tmp_path / "a.safetensors"
    ids, mask = np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(12).reshape(3, 4) % 2
    convert = torch.from_numpy if library is save_torch else np.asarray
    library({"input_ids": convert(ids), "loss_mask": convert(mask.astype(np.uint8))}, path)
    array = open_array(data_file(path, "safetensors"), "")
    assert array.ids.tolist() == list(range(12))
    assert array.trained is not None and array.trained.tolist() == mask.reshape(-1).tolist()
    assert array.borders is not None and array.borders.tolist() == [0, 4, 8, 12]


def test_other_safetensors_are_refused(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.safetensors"
    for tensors, message in (
        ({"ids": np.arange(3)}, 'has no tensor "input_ids"; it has ids'),
        ({"input_ids": np.ones(3)}, "is not a whole safetensors file of whole numbers"),
        ({"input_ids": np.arange(3), "loss_mask": np.arange(2)}, r"loss_mask has shape \[2\]"),
        ({"input_ids": np.arange(3), "labels": np.arange(3)}, "has labels, .*store loss_mask"),
        ({"input_ids": np.arange(3), "attention_mask": np.arange(3)}, "attention_mask has zeros"),
    ):
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            open_array(data_file(path, "safetensors"), "")
    save_file({"input_ids": np.arange(3)}, path)
    for cut in (4, 30, path.stat().st_size - 1):
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            open_array(data_file(path, "safetensors"), "")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_megatrons_documents_are_those_of_its_index(
    tmp_path: Path, data_file: Make, dtype: Any
) -> None:
    path = tmp_path / "a.bin"
    write_megatron(path, [[1, 2, 3], [], [4, 5]], dtype)
    array = open_array(data_file(path, "megatron"), "")
    assert array.ids.tolist() == [1, 2, 3, 4, 5]
    assert array.borders is not None and array.borders.tolist() == [0, 3, 3, 5]


def test_a_wrong_index_is_refused(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.bin"
    write_megatron(path, [[1, 2, 3], [4, 5]])
    index = path.with_suffix(".idx").read_bytes()
    for wrong, message in (
        (b"x" * 100, "is not an index of Megatron's"),
        (index[:20], "is not an index of Megatron's"),
        (index[:-1], "is damaged or of another version: version 1, dtype code 8"),
        (
            index.replace(b"\x01\x00\x00\x00\x00\x00\x00\x00\x08", b"\x02" + b"\0" * 7 + b"\x08"),
            "version 2",
        ),
    ):
        path.with_suffix(".idx").write_bytes(wrong)
        with pytest.raises(ValueError, match=message):
            open_array(data_file(path, "megatron"), "")
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"does not describe .*5 tokens of 2 bytes .* has 8 bytes"):
        open_array(data_file(path, "megatron"), "")
    path.with_suffix(".idx").unlink()
    with pytest.raises(ValueError, match="its index cannot be read"):
        open_array(data_file(path, "megatron"), "")


def test_ids_outside_of_the_vocabulary_are_named(tmp_path: Path, data_file: Make) -> None:
    path = tmp_path / "a.bin"
    path.write_text(json.dumps([]))
    file = data_file(path, "bin")
    check_ids(np.array([0, 299]), 300, file, 0)
    with pytest.raises(ValueError, match=r"a\.bin: token 101 is 300, but the tokenizer has 300"):
        check_ids(np.array([0, 300], np.uint16), 300, file, 100)
    with pytest.raises(ValueError, match="token 0 is -1"):
        check_ids(np.array([-1]), 300, file, 0)

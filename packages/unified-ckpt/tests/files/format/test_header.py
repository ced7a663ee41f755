import json
import math
import random
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

from unified_ckpt.errors import CorruptCheckpointError
from unified_ckpt.files import OpenFolder
from unified_ckpt.files.format.header import HeaderEntry, encode_header, read_header
from unified_ckpt.geometry.tensors.dtypes import dtype_of, header_shape, stored_dtype, torch_shape

NAMES = [
    "BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32", "F64",
    "C64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0", "F4",
]  # fmt: skip


def header_of(path: Path) -> tuple[bytes, tuple[HeaderEntry, ...]]:
    with OpenFolder(path.parent) as folder:
        return read_header(folder, path.name)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_written_as_the_safetensors_library_writes_it(
    name: str, tmp_path: Path
) -> None:
    dtype = dtype_of(name)
    assert dtype.torch_dtype is not None and stored_dtype(dtype.torch_dtype) == dtype
    raw = torch.randint(0, 2, (3, 4 * dtype.itemsize_bytes), dtype=torch.uint8)
    tensor = raw.view(dtype.torch_dtype)
    path = tmp_path / "x.safetensors"
    header, _ = encode_header([HeaderEntry(key="x", dtype=name, shape=tuple(tensor.shape))])
    path.write_bytes(header + raw.numpy().tobytes())
    loaded = safetensors.torch.load_file(path)["x"]
    assert (loaded.dtype, loaded.shape, bits(loaded)) == (tensor.dtype, tensor.shape, bits(tensor))
    safetensors.torch.save_file({"x": tensor}, path, metadata={"format": "pt"})
    raw_header, (entry,) = header_of(path)
    assert (entry.dtype, entry.shape) == (name, (3, 4))
    assert json.loads(raw_header[8:]) == json.loads(header[8:])


def test_packed_and_six_bit_floats_have_the_shapes_that_torch_can_hold() -> None:
    assert header_shape(dtype_of("F4"), (3, 4)) == (3, 8)
    assert torch_shape(dtype_of("F4"), (3, 8)) == (3, 4)
    assert torch_shape(dtype_of("F4"), (3, 7)) is None
    assert torch_shape(dtype_of("F6_E2M3"), (4,)) is None


def test_a_dtype_that_the_format_lacks_is_refused_with_the_alternatives() -> None:
    with pytest.raises(TypeError, match=r"cannot hold torch.complex128.*float32"):
        stored_dtype(torch.complex128)


def file_of(table: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (file_of({}, length=2**40), "states a header"),
        (file_of({}, length=2**63), "states a header"),
        (file_of(b"\xff\xfe"), "malformed"),
        (file_of(b"[1]"), "not a JSON object"),
        (file_of(b"[" * 100_000), "malformed"),
        (file_of(b'{"a":1,"a":2}'), "'a' appears twice"),
        (file_of({"a": 3}), "malformed"),
        (file_of({"a": entry("F33")}, bytes(8)), "unknown dtype 'F33'"),
        (file_of({"a": entry(shape=[-2])}, bytes(8)), "expected a list of numbers"),
        (file_of({"a": entry(shape=[True, 2])}, bytes(8)), "expected a list of numbers"),
        (file_of({"a": entry(offsets=[0, 4])}, bytes(4)), "is not bytes"),
        (file_of({"a": entry(offsets=[0])}, bytes(8)), "malformed"),
        (file_of({"a": entry(offsets=[4, 12])}, bytes(12)), "begins at byte"),
        (file_of({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "begins at byte"),
        (file_of({"a": entry()}, bytes(7)), "the tensors end at"),
        (file_of({"a": entry()}, bytes(9)), "the tensors end at"),
        (file_of({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "is not bytes"),
        (file_of({"a": entry("F4", [3], [0, 1])}, bytes(1)), "is not bytes"),
        (file_of({"a": entry(shape=[1] * 65)}, bytes(8)), "no tensor has 65 dims"),
        (file_of({"a": entry(shape=[2**63])}, bytes(8)), "no tensor has 1 dims of such sizes"),
        (file_of(b'{"a:b":1,"a:b":2}'), "'a:b' appears twice"),
    ],
)
def test_malformed_files_are_refused_with_a_reason(
    raw: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        header_of(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": entry()}).encode("utf-16"),
        json.dumps({"a": entry()}).encode("utf-32-le"),
        b"\xef\xbb\xbf" + json.dumps({"a": entry()}).encode(),
        json.dumps({"__metadata__": {"a": 1}, "a": entry()}).encode(),
        json.dumps({"__metadata__": [1], "a": entry()}).encode(),
        json.dumps({"__metadata__": {"a": math.nan}, "a": entry()}).encode(),
        json.dumps({"\ud800": entry()}).encode(),
        json.dumps({"__metadata__": {"a": "\ud800"}, "a": entry()}).encode(),
    ],
)
def test_what_the_safetensors_library_refuses_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(text, bytes(8)))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(path)
    with pytest.raises(CorruptCheckpointError, match="malformed safetensors header"):
        header_of(path)


def test_escaped_characters_of_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"é😀": entry(), "__metadata__": None}, bytes(8)))
    assert [found.key for found in header_of(path)[1]] == ["é😀"]
    assert list(safetensors.torch.load_file(path)) == ["é😀"]


def test_mutated_headers_give_an_entry_table_or_an_error_and_nothing_else(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(
        {"a": torch.ones(2, 3), "b": torch.ones(0), "c": torch.ones(())}, path
    )
    good = path.read_bytes()
    for _ in range(500):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
        try:
            header_of(path)
        except CorruptCheckpointError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error

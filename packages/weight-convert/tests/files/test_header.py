import json
import struct
from pathlib import Path
from typing import Any

import pytest

from weight_convert.errors import CorruptFileError
from weight_convert.files.header import DTYPE_BITS, encode_header, layout_order, read_header


def put(path: Path, fields: object, data: bytes = b"", *, pad: int = 0) -> Path:
    text = (fields if isinstance(fields, bytes) else json.dumps(fields).encode()) + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def field(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_file_order_with_places_in_the_file(tmp_path: Path) -> None:
    fields = {
        "b": field("F32", [2, 3], 4, 28),
        "a": field("U8", [4], 0, 4),
        "empty": field("BF16", [0, 7], 28, 28),
        "scalar": field("I64", [], 28, 36),
        "__metadata__": {"format": "pt", "ключ": "值"},
    }
    path = put(tmp_path / "x", fields, bytes(36), pad=4000)
    header = read_header(path)
    start = path.stat().st_size - 36
    assert [(t.key, t.shape, t.offset_bytes - start, t.size_bytes) for t in header.tensors] == [
        ("a", (4,), 0, 4),
        ("b", (2, 3), 4, 24),
        ("empty", (0, 7), 28, 0),
        ("scalar", (), 28, 8),
    ]
    assert header.metadata == {"format": "pt", "ключ": "值"}
    assert header.size_bytes == path.stat().st_size


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    assert read_header(put(tmp_path / "x", {})).tensors == ()


@pytest.mark.parametrize(
    ("fields", "data", "said"),
    [
        ({"a": field("U8", [4], 0, 4)}, 3, "is truncated"),
        ({"a": field("U8", [4], 0, 4)}, 5, "has trailing bytes"),
        ({"a": field("U8", [4], 1, 5)}, 5, "follows a hole"),
        ({"a": field("U8", [4], 0, 4), "b": field("U8", [4], 2, 6)}, 6, "b overlaps"),
        ({"a": field("U8", [4], 0, 4), "b": field("U8", [4], 0, 4)}, 4, "b overlaps"),
        ({"a": field("F32", [4], 0, 4)}, 4, "needs 16 bytes"),
        ({"a": field("F5", [4], 0, 4)}, 4, "unknown dtype 'F5'"),
        ({"a": field("F4", [3], 0, 2)}, 2, "does not fill whole bytes"),
        ({"a": field("U8", [-4], 0, 4)}, 4, "shape"),
        ({"a": field("U8", [True], 0, 1)}, 1, "shape"),
        ({"a": field("U8", [1.0], 0, 1)}, 1, "shape"),  # type: ignore[list-item]
        ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}, 1, "a: "),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1]}}, 1, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "lacks"),
        ({"a": 3}, 0, "lacks"),
        ([], 0, "not an object"),
        ({"__metadata__": {"a": 1}}, 0, "strings to strings"),
        ({"__metadata__": []}, 0, "strings to strings"),
        (b'{"a":', 0, "is not JSON"),
        (b"\xff\xfe", 0, "is not JSON"),
        (b'{"\\ud800": 3}', 0, "is not JSON"),
        (b"[" * 100_000, 0, "is not JSON"),
        (b'{"a": 1, "a": 2}', 0, "names a more than once"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, fields: object, data: int, said: str
) -> None:
    path = put(tmp_path / "bad.safetensors", fields, bytes(data))
    with pytest.raises(CorruptFileError, match=said) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1), struct.pack("<Q", 2**63) + b"{}"]
)
def test_a_file_too_short_for_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="no complete safetensors file"):
        read_header(path)


def test_what_is_encoded_reads_back(tmp_path: Path) -> None:
    tensors = [("a", "F32", (2, 3)), ("b", "BF16", (0,)), ("c", "U8", ())]
    head = encode_header(tensors, {"format": "pt"})
    assert len(head) % 8 == 0
    assert head[8:].startswith(b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3]')
    path = tmp_path / "x"
    path.write_bytes(head + bytes(25))
    header = read_header(path)
    assert [(t.key, t.dtype, t.shape) for t in header.tensors] == tensors


def test_absent_metadata_stays_absent() -> None:
    assert encode_header([], {})[8:] == b"{}      "


def test_tensors_of_wide_elements_come_first_so_that_all_are_aligned() -> None:
    names = [("U8", "a"), ("BF16", "a"), ("F32", "b"), ("F32", "a"), ("I64", "z"), ("BOOL", "a")]
    ordered = sorted(names, key=lambda name: layout_order(*name))
    assert ordered == [
        ("I64", "z"),
        ("F32", "a"),
        ("F32", "b"),
        ("BF16", "a"),
        ("U8", "a"),
        ("BOOL", "a"),
    ]
    bits = [DTYPE_BITS[dtype] for dtype, _ in ordered]
    assert bits == sorted(bits, reverse=True)

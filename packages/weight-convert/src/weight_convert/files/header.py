"""Read, check and write the header of a safetensors file, without the safetensors library.

Moving bytes needs only the header: an 8-byte little-endian length, then JSON that gives each
tensor's dtype, shape and byte range, then the data. Reading it here keeps the package free of
torch and lets it know *where* each tensor is, which the library does not tell.

Invariant: a `FileHeader` that was returned describes the whole file; its tensors tile the data
without hole or overlap, each range has the size of its shape and dtype, and the file's size is as
stated.

    header = read_header(Path("model.safetensors"))
    header.tensors[0].key, header.tensors[0].offset_bytes

Format: https://github.com/huggingface/safetensors; files are laid out as version 0.8 does.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_convert._checks import checked_path
from weight_convert._entries import DTYPE_BITS as DTYPE_BITS
from weight_convert._entries import TensorEntry as TensorEntry
from weight_convert._entries import tensor_size_bytes as tensor_size_bytes
from weight_convert.errors import CorruptFileError, WeightConvertError

_DTYPE_ORDER = {dtype: order for order, dtype in enumerate(DTYPE_BITS)}
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """The checked header of one file: tensors in file order, free-form metadata, its size."""

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    size_bytes: int


def layout_order(dtype: str, key: str) -> tuple[int, str]:
    """Return the sort key that puts tensors into the order in which the library writes them."""
    return -_DTYPE_ORDER[dtype], key


def read_header(path: Path | str) -> FileHeader:
    """Read and check the header of the file `path`; no tensor data is read.

    Raises:
        CorruptFileError: the header breaks the format, or the file is not as long as it says.
        OSError: the file cannot be opened or read.
    """
    path = checked_path(path)
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise CorruptFileError(
                f"{path} is no complete safetensors file: its {size_bytes} bytes cannot hold the "
                f"header that it announces; copy or download it again"
            )
        text = file.read(header_bytes)
    fields = _parse_json(path, text)
    metadata = _parse_metadata(path, fields.pop(_METADATA_KEY, {}))
    data_start = 8 + header_bytes
    entries = [_parse_entry(path, key, value, data_start) for key, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.size_bytes, entry.key))
    _check_tiling(path, entries, data_start, size_bytes)
    return FileHeader(tensors=tuple(entries), metadata=metadata, size_bytes=size_bytes)


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return length prefix and header of a file that holds `tensors`, one after the other.

    Args:
        tensors: (key, dtype, shape) in file order; see `layout_order`.
        metadata: free-form strings, left out when empty.

    Returns:
        The bytes before the first tensor, padded to a multiple of 8 as the library does.
    """
    fields: dict[str, object] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + tensor_size_bytes(dtype, shape)
        fields[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """Parse the header's JSON object; a key that stands twice is an error, not a silent loss."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice = sorted(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            raise CorruptFileError(f"{path}: the header names {', '.join(twice)} more than once")
        return fields

    try:
        decoded = text.decode()  # json.loads would take other encodings of bytes as well
        fields = json.loads(decoded, object_pairs_hook=unique, parse_constant=_no_constant)
        # half a surrogate pair is valid JSON, but no text
        _ = json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorruptFileError):
            raise
        raise CorruptFileError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise CorruptFileError(
            f"{path}: the header is a JSON {type(fields).__name__}, not an object"
        )
    return fields


def _no_constant(name: str) -> None:
    raise WeightConvertError(f"{name} is not JSON")


def _parse_metadata(path: Path, value: object) -> dict[str, str]:
    """Return `__metadata__` as a mapping of strings; null is none, as the library reads it."""
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise CorruptFileError(f"{path}: {_METADATA_KEY} must map strings to strings")


def _parse_entry(path: Path, key: str, value: object, data_start: int) -> TensorEntry:
    """Return one tensor of the header, its range checked against shape and dtype."""
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise CorruptFileError(f"{path}: {key} lacks dtype, shape or data_offsets")
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CorruptFileError(f"{path}: {key} has shape {shape} and data_offsets {offsets}")
    try:
        expected = tensor_size_bytes(value["dtype"], shape)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"{path}: {key}: {error}") from error
    begin, end = offsets
    if end - begin != expected:
        raise CorruptFileError(
            f"{path}: {key} ({value['dtype']} {shape}) needs {expected} bytes, "
            f"but its range [{begin}, {end}) has {end - begin}"
        )
    return TensorEntry(
        key=key,
        dtype=value["dtype"],
        shape=tuple(shape),
        offset_bytes=data_start + begin,
        size_bytes=expected,
    )


def _are_sizes(value: object) -> bool:
    """Return whether `value` is a list of integers of 64 bits without sign (booleans are not)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**64 for n in value)


def _check_tiling(
    path: Path, entries: Sequence[TensorEntry], data_start: int, size_bytes: int
) -> None:
    """Raise unless the entries, in file order, cover the data exactly up to the end of the file."""
    end = data_start
    for entry in entries:
        if entry.offset_bytes != end:
            what = "overlaps the tensor before it" if entry.offset_bytes < end else "follows a hole"
            raise CorruptFileError(
                f"{path}: {entry.key} {what} (starts at byte {entry.offset_bytes}, expected {end})"
            )
        end += entry.size_bytes
    if end != size_bytes:
        what = "is truncated" if size_bytes < end else "has trailing bytes"
        raise CorruptFileError(
            f"{path} {what}: the header describes {end} bytes, the file has {size_bytes}; "
            f"copy or download it again"
        )

"""The header of a safetensors file, written and read strictly.

A file is 8 bytes (header length, little endian), the header (JSON, padded with blanks to a multiple
of 8 bytes) and the tensors' bytes without holes. Reading refuses what the safetensors library
refuses, and never allocates more than the file's own size.

    header = encode_header([HeaderEntry(key="w", dtype="F32", shape=(2,))])
"""

import json
import math
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from unified_ckpt.errors import CheckpointValueError, CorruptCheckpointError
from unified_ckpt.files import PositionedFile, ReadFolder, read_at, size_of
from unified_ckpt.geometry import Shape
from unified_ckpt.geometry.tensors import StoredDtype, dtype_of, header_shape, torch_shape

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer headers
_MAX_DIMS = 64  # of torch; bounds the work of multiplying them
_MAX_DIM = 2**63 - 1
_quote = json.encoder.encode_basestring  # a JSON string, not only of ASCII


_Form = tuple[str, Shape | None, int]  # dtype, torch's shape, bytes of a tensor


class HeaderEntry(NamedTuple):
    """A tensor of a file: `shape` is torch's shape, `begin` and `end` are offsets in the file.

    `shape` is None where torch has no tensor for it (6-bit floats).
    """

    key: str
    dtype: str
    shape: Shape | None
    begin: int = 0
    end: int = 0


def encode_header(entries: Sequence[HeaderEntry]) -> tuple[bytes, tuple[HeaderEntry, ...]]:
    """Lay tensors out in the order given; return the file's first bytes and the placed entries."""
    position = 0
    spans: list[tuple[int, int]] = []
    lines = ['"__metadata__":{"format":"pt"}']
    for entry in entries:
        dtype = dtype_of(entry.dtype)
        shape = entry.shape or ()
        begin, position = position, position + math.prod(shape) * dtype.itemsize_bytes
        spans.append((begin, position))
        dims = ",".join(map(str, header_shape(dtype, shape)))
        lines.append(
            f'{_quote(entry.key)}:{{"dtype":"{entry.dtype}","shape":[{dims}],'
            f'"data_offsets":[{begin},{position}]}}'
        )
    text = f"{{{','.join(lines)}}}".encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointValueError(
            f"{len(entries)} tensors need a header of {len(text)} bytes; readers accept "
            f"{MAX_HEADER_BYTES}; lower max_shard_bytes"
        )
    base = 8 + len(text)
    placed = tuple(
        HeaderEntry(key=e.key, dtype=e.dtype, shape=e.shape, begin=base + begin, end=base + end)
        for e, (begin, end) in zip(entries, spans, strict=True)
    )
    return struct.pack("<Q", len(text)) + text, placed


def read_header(folder: ReadFolder, name: str) -> tuple[bytes, tuple[HeaderEntry, ...]]:
    """Read and check the header of a file; entries come in the order of their bytes."""
    path = folder.path / name
    with folder.open(name) as file:
        file_bytes = size_of(file)
        length = _header_length(path, _read_some(file, 0, 8), file_bytes)
        raw = _read_some(file, 8, length)
    if len(raw) != length:
        raise CorruptCheckpointError(f"{path}: header is cut short")
    try:
        entries = _entries(_parse(raw), 8 + length, file_bytes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: malformed safetensors header: {error}") from error
    return struct.pack("<Q", length) + raw, entries


def _read_some(file: int | PositionedFile, start: int, num_bytes: int) -> bytes:
    raw = bytearray(num_bytes)
    return bytes(raw[: read_at(file, [memoryview(raw)], start)])


def _header_length(path: object, first: bytes, file_bytes: int) -> int:
    if len(first) < 8:
        raise CorruptCheckpointError(f"{path}: {file_bytes} bytes are too few for a header")
    length: int = struct.unpack("<Q", first)[0]
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise CorruptCheckpointError(
            f"{path}: states a header of {length} bytes, but the file has {file_bytes} bytes"
        )
    return length


def _parse(raw: bytes) -> object:
    """Parse JSON in UTF-8; refuse keys that appear twice, of which the parser would drop one."""
    text = raw.decode()  # json.loads would take other encodings of bytes as well
    table = json.loads(text, parse_constant=_no_constant)
    if b"\\u" in raw:
        json.dumps(table, ensure_ascii=False).encode()  # half a surrogate pair has no UTF-8
    if isinstance(table, dict):
        pairs = len(table) + sum(len(v) for v in table.values() if isinstance(v, dict))
        if raw.count(b":") == pairs:  # every pair is there; most headers end here
            return table
    return json.loads(text, object_pairs_hook=_no_duplicates)


def _no_constant(name: str) -> None:
    raise CheckpointValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointValueError(f"key {twice!r} appears twice")
    return table


def _entries(table: object, base: int, file_bytes: int) -> tuple[HeaderEntry, ...]:
    if not isinstance(table, dict):
        raise CheckpointValueError("it is not a JSON object")
    metadata = table.get("__metadata__")
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or {*map(type, metadata.values())} - {str}:
        raise CheckpointValueError("its __metadata__ is not an object of strings")
    forms: dict[tuple[object, Shape], _Form] = {}
    entries = [
        _entry(key, value, base, forms) for key, value in table.items() if key != "__metadata__"
    ]
    entries.sort(key=itemgetter(3, 4))
    position = base
    for key, _, _, begin, end in entries:
        if begin != position:
            raise CheckpointValueError(f"{key!r} begins at byte {begin}, not {position}")
        position = end
    if position != file_bytes:
        raise CheckpointValueError(f"the tensors end at byte {position}, the file at {file_bytes}")
    return tuple(entries)


def _entry(
    key: str, value: dict[str, object], base: int, forms: dict[tuple[object, Shape], _Form]
) -> HeaderEntry:
    name, stated = value["dtype"], _ints(key, value["shape"])
    form = forms.get((name, stated))
    if form is None:
        form = forms[name, stated] = _form(key, str(name), stated)
    begin, end = _ints(key, value["data_offsets"])
    dtype, shape, num_bytes = form
    if end - begin != num_bytes:
        raise CheckpointValueError(f"{key!r}: {dtype} {stated} is not bytes {begin} to {end}")
    return HeaderEntry(key, dtype, shape, base + begin, base + end)


def _form(key: str, name: str, stated: Shape) -> _Form:
    """Return what a dtype and a stated shape mean; most tensors of a file share few of them."""
    dtype: StoredDtype = dtype_of(name)
    if len(stated) > _MAX_DIMS or (stated and max(stated) > _MAX_DIM):
        raise CheckpointValueError(f"{key!r}: no tensor has {len(stated)} dims of such sizes")
    bits = math.prod(stated) * dtype.bits
    if bits % 8:
        raise CheckpointValueError(f"{key!r}: {dtype.name} {stated} is not bytes, but {bits} bits")
    return dtype.name, torch_shape(dtype, stated), bits // 8


def _ints(key: str, value: object) -> Shape:
    for number in value if isinstance(value, list) else (None,):
        if type(number) is not int or number < 0:
            raise CheckpointValueError(f"{key!r}: expected a list of numbers, got {value!r}")
    return tuple(value)  # type: ignore[arg-type]

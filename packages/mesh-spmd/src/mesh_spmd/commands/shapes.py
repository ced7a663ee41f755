"""Names, dtypes and shapes of tensors, from safetensors headers alone or from a list in a file.

read_shapes("checkpoint-100")["model.norm.weight"]    # StoredShape("BF16", (512,), 1024)
read_entries("tensors.toml")["model.norm.weight"]     # {"dtype": "BF16", "shape": [512], ...}
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import NamedTuple

from mesh_spmd.errors import MeshValueError

_HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64},
}


class StoredShape(NamedTuple):
    """One stored tensor: safetensors' name of its dtype, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_shapes(source: str) -> dict[str, StoredShape]:
    """Return the tensors of a safetensors file, of a folder of them, or of a list in JSON or TOML.

    Raises:
        MeshValueError: there is nothing, it is damaged, or two files have a tensor of one name.
    """
    return {name: _stored_shape(entry) for name, entry in read_entries(source).items()}


class Entry(NamedTuple):
    """What a file says of one tensor, and where: the file and the name, for errors."""

    where: str
    fields: dict[str, object]


def read_entries(source: str) -> dict[str, Entry]:
    """Return what files say of each tensor; every entry is a table, and nothing more is checked.

    Raises:
        MeshValueError: there is nothing, it is damaged, or two files have a tensor of one name.
    """
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise MeshValueError(f"{source} has no *.safetensors; give a file or a folder of them")
    found: dict[str, Entry] = {}
    for file in files:
        for name, fields in _table(file).items():
            if name == "__metadata__":
                continue
            if name in found:
                raise MeshValueError(f"{file} has {name}, which another file has too")
            if not isinstance(fields, dict):
                raise MeshValueError(
                    f'{file}: {name} must be {{"dtype": ..., "shape": [...]}}, got {fields!r}'
                )
            found[name] = Entry(f"{file}: {name}", fields)
    if not found:
        raise MeshValueError(f"{source} holds no tensor")
    return found


def _table(file: Path) -> dict[str, object]:
    try:
        text = _header(file) if file.suffix == ".safetensors" else file.read_bytes()
        table = tomllib.loads(text.decode()) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise MeshValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise MeshValueError(f"{file} must hold a JSON object of tensors")
    return table


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > min(_HEADER_LIMIT, file.stat().st_size):
            raise MeshValueError(f"its header would be {size} bytes; it is no safetensors file")
        return opened.read(size)


def _stored_shape(entry: Entry) -> StoredShape:
    where, fields = entry
    if not {"dtype", "shape"} <= fields.keys():
        raise MeshValueError(f'{where} must be {{"dtype": ..., "shape": [...]}}, got {fields!r}')
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise MeshValueError(f"{where} has dtype {dtype!r}; expected one of {', '.join(_BITS)}")
    shape = shape_of(entry)
    return StoredShape(dtype, shape, math.prod(shape) * _BITS[dtype] // 8)


def shape_of(entry: Entry) -> tuple[int, ...]:
    """Return the shape that an entry gives.

    Raises:
        MeshValueError: it gives none, or it is no list of sizes.
    """
    shape = entry.fields.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise MeshValueError(f"{entry.where} has shape {shape!r}; expected a list of sizes")
    return tuple(shape)

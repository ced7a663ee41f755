"""Names, dtypes and shapes of stored tensors, from headers alone; no data is read.

read_shapes("checkpoint-100")["model.norm.weight"]    # StoredShape("BF16", (512,), 1024)
"""

from __future__ import annotations

import json
import math
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
    """Return the tensors of a safetensors file, of a folder of them, or of a list in JSON.

    Raises:
        MeshValueError: there is nothing, it is damaged, or two files have a tensor of one name.
    """
    path = Path(source)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise MeshValueError(f"{source} has no *.safetensors; give a file or a folder of them")
    found: dict[str, StoredShape] = {}
    for file in files:
        try:
            table = _header(file) if file.suffix == ".safetensors" else file.read_bytes()
            entries = json.loads(table)
        except (OSError, ValueError, RecursionError) as error:
            raise MeshValueError(f"{file} cannot be read: {error}") from error
        if not isinstance(entries, dict):
            raise MeshValueError(f"{file} must hold a JSON object of tensors")
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise MeshValueError(f"{file} has {name}, which another file has too")
            found[name] = _stored_shape(f"{file}: {name}", entry)
    if not found:
        raise MeshValueError(f"{source} holds no tensor")
    return found


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > min(_HEADER_LIMIT, file.stat().st_size):
            raise MeshValueError(f"its header would be {size} bytes; it is no safetensors file")
        return opened.read(size)


def _stored_shape(where: str, entry: object) -> StoredShape:
    if not isinstance(entry, dict) or not {"dtype", "shape"} <= entry.keys():
        raise MeshValueError(f'{where} must be {{"dtype": ..., "shape": [...]}}, got {entry!r}')
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise MeshValueError(f"{where} has dtype {dtype!r}; expected one of {', '.join(_BITS)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise MeshValueError(f"{where} has shape {shape!r}; expected a list of sizes")
    return StoredShape(dtype, tuple(shape), math.prod(shape) * _BITS[dtype] // 8)

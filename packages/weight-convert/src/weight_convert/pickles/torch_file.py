"""The tensors of a file that `torch.save` wrote, as byte ranges; nothing of its pickle is run.

Such a file is a zip whose entries are not compressed: `data.pkl` says which tensor lies in which
entry, and each entry is the bytes of one storage. So reading one needs no torch.

    entries, skipped = read_torch_file(Path("pytorch_model.bin"))

Invariant: a tensor that is returned is contiguous and lies inside its storage.
"""

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from weight_convert._entries import TensorEntry, tensor_size_bytes
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.pickles.reading import Call, Named, Persistent, read_pickle

_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
TORCH_NAMES: Mapping[str, str] = {stored: name for name, stored in _DTYPES.items()}
_STORAGES = {
    "torch.BoolStorage": "BOOL",
    "torch.ByteStorage": "U8",
    "torch.CharStorage": "I8",
    "torch.ShortStorage": "I16",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.IntStorage": "I32",
    "torch.FloatStorage": "F32",
    "torch.ComplexFloatStorage": "C64",
    "torch.DoubleStorage": "F64",
    "torch.LongStorage": "I64",
}
_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_TORCH_GLOBALS = frozenset(
    {
        "collections.OrderedDict",
        "torch.Size",
        "torch.storage.UntypedStorage",
        *_REBUILD,
        *_PARAMETER,
        *_STORAGES,
        *(f"torch.{name}" for name in _DTYPES),
    }
)
_NESTED = ("state_dict", "model", "module")
_MAX_STREAM_BYTES = 1 << 30
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def read_torch_file(
    path: Path, begin: int = 0, size_bytes: int | None = None
) -> tuple[list[TensorEntry], list[str]]:
    """The tensors of a state dict, and the names of what else it holds.

    Args:
        path: the file.
        begin, size_bytes: where in it the zip stands; None for all of it. One tensor alone, as
            DCP stores it, has the key "".

    Raises:
        CorruptFileError: no file of torch 1.6 or newer, or one that is damaged or holds code.
        WeightConvertError: a tensor that does not lie in one piece.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        end = file.seek(0, 2) if size_bytes is None else begin + size_bytes
        try:
            window = _Window(file, begin, end)
            with zipfile.ZipFile(window) as archive:
                return _read(path, file, begin, end, archive)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeError) as error:
            raise CorruptFileError(
                f"{path} is no file that torch.save of torch 1.6 or newer wrote ({error}); load it "
                f"with torch and save it again, or copy it again"
            ) from error


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._begin, self._end = file, begin, end
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._end - self._begin)[whence]
        if not 0 <= base + offset <= 2**62:
            raise zipfile.BadZipFile("a place outside of it")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._end - self._begin - self._at, 0)
        self._file.seek(self._begin + self._at)
        found = self._file.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


def _read(
    path: Path, file: BinaryIO, begin: int, end: int, archive: zipfile.ZipFile
) -> tuple[list[TensorEntry], list[str]]:
    places = {}
    for entry in archive.infolist():
        if not 0 <= entry.header_offset <= end - begin - _LOCAL_HEADER.size:
            raise CorruptFileError(f"{path}: {entry.filename} lies outside")
        file.seek(begin + entry.header_offset)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        at = begin + entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\3\4" or entry.compress_type or at + entry.file_size > end:
            raise CorruptFileError(f"{path}: {entry.filename} is compressed or lies outside")
        places[entry.filename.partition("/")[2]] = (at, entry.file_size)
    if "data.pkl" not in places:
        raise CorruptFileError(f"{path} is a zip without data.pkl; torch.save writes one")
    order = places.get("byteorder")
    if order is not None:
        file.seek(order[0])
        if file.read(min(order[1], 16)) != b"little":
            raise CorruptFileError(f"{path} was written on a machine of big endian")
    at, size = places["data.pkl"]
    if size > _MAX_STREAM_BYTES:
        raise CorruptFileError(f"{path}: its data.pkl has {size} bytes")
    file.seek(at)
    state = read_pickle(file, path, end=at + size, allowed=_TORCH_GLOBALS)
    if isinstance(state, Call):
        return [_torch_entry(path, "", state, places)], []
    if not isinstance(state, dict):
        raise CorruptFileError(f"{path} holds a {type(state).__name__}, no state dict")
    inner = next((state[n] for n in _NESTED if isinstance(state.get(n), dict)), state)
    skipped = [str(key) for key in state] if inner is not state else []
    skipped += [str(key) for key, value in inner.items() if not isinstance(value, Call)]
    tensors = {key: value for key, value in inner.items() if isinstance(value, Call)}
    return [_torch_entry(path, str(key), value, places) for key, value in tensors.items()], [
        name for name in skipped if inner is state or name not in _NESTED
    ]


def _torch_entry(
    path: Path, key: str, call: Call, places: Mapping[str, tuple[int, int]]
) -> TensorEntry:
    """One tensor, its range checked against its storage."""
    if call.name in _PARAMETER and call.args and isinstance(call.args[0], Call):
        call = call.args[0]
    if call.name not in _REBUILD or len(call.args) < 6:
        raise CorruptFileError(f"{path}: {key} is made by {call.name}, which is no plain tensor")
    storage, offset, shape, stride = call.args[:4]
    dtype, at, size = _storage(path, key, storage, call.args[6:], places)
    are_counts = all(map(_are_counts, (shape, stride, (offset,))))
    if not are_counts or len(shape) != len(stride):
        raise CorruptFileError(f"{path}: {key} has shape {shape}, strides {stride} at {offset}")
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    is_plain = all(n == 1 or a == b for n, a, b in zip(shape, stride, expected, strict=True))
    if not is_plain and math.prod(shape):
        raise WeightConvertError(
            f"{path}: {key} {list(shape)} has strides {list(stride)}, so its elements do not lie "
            f"in order; save it with tensor.contiguous()"
        )
    begin, length = tensor_size_bytes(dtype, (offset,)), tensor_size_bytes(dtype, shape)
    if begin + length > size:
        raise CorruptFileError(f"{path}: {key} needs {begin + length} bytes of a storage of {size}")
    return TensorEntry(
        key=key, dtype=dtype, shape=tuple(shape), offset_bytes=at + begin, size_bytes=length
    )


def _storage(
    path: Path,
    key: str,
    storage: Any,
    rest: tuple[Any, ...],
    places: Mapping[str, tuple[int, int]],
) -> tuple[str, int, int]:
    """Dtype, offset and bytes of a storage."""
    parts = storage.key if isinstance(storage, Persistent) else ()
    if not isinstance(parts, tuple) or len(parts) < 3 or not isinstance(parts[1], Named):
        raise CorruptFileError(f"{path}: {key} has no storage that torch.save writes")
    dtype = _STORAGES.get(parts[1].name, "")
    if rest and isinstance(rest[0], Named):
        dtype = _DTYPES.get(rest[0].name.removeprefix("torch."), "")
    place = places.get(f"data/{parts[2]}")
    if not dtype or place is None:
        raise CorruptFileError(f"{path}: {key} has {parts[1].name}, or its bytes are missing")
    return dtype, *place


def _are_counts(value: object) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 2**62 for n in value)


def dtype_of(name: str) -> str | None:
    """The safetensors name of a dtype `torch.bfloat16`; None if there is none."""
    return _DTYPES.get(name.removeprefix("torch."))

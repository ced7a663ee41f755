"""The pickles of weight files, written as the libraries write them, without running theirs.

    torch_pickle([("norm.weight", "BF16", (8,))])     # data.pkl of a state dict
    dcp_pickle(...)                                   # .metadata of a distributed checkpoint

Only opcodes that `reading.py` knows are used.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weight_convert._entries import tensor_size_bytes
from weight_convert.errors import WeightConvertError
from weight_convert.pickles.paddle_file import NAMES_KEY, NUMPY_NAMES
from weight_convert.pickles.torch_file import TORCH_NAMES

_STORAGE_NAMES: Mapping[str, str] = {
    "BOOL": "BoolStorage",
    "U8": "ByteStorage",
    "I8": "CharStorage",
    "I16": "ShortStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I32": "IntStorage",
    "F32": "FloatStorage",
    "C64": "ComplexFloatStorage",
    "F64": "DoubleStorage",
    "I64": "LongStorage",
}
_ORDERED = b"ccollections\nOrderedDict\n)R"
Described = tuple[str, str, Sequence[int]]  # key, dtype, shape


def torch_pickle(tensors: Sequence[Described]) -> bytes:
    """`data.pkl` of a state dict whose n-th tensor is the storage `data/n`."""
    items = b"".join(
        _text(key) + _torch_tensor(number, key, dtype, shape)
        for number, (key, dtype, shape) in enumerate(tensors)
    )
    return b"\x80\x02" + _ORDERED + b"(" + items + b"u."


def one_torch_pickle(tensor: Described) -> bytes:
    """`data.pkl` of one tensor alone."""
    return b"\x80\x02" + _torch_tensor(0, *tensor) + b"."


def _torch_tensor(number: int, key: str, dtype: str, shape: Sequence[int]) -> bytes:
    if dtype not in TORCH_NAMES:
        raise WeightConvertError(f"{key} is {dtype}, which torch has no tensors of")
    is_typed = dtype in _STORAGE_NAMES
    count = math.prod(shape) if is_typed else tensor_size_bytes(dtype, shape)
    kind = f"torch\n{_STORAGE_NAMES[dtype]}" if is_typed else "torch.storage\nUntypedStorage"
    storage = _text("storage") + f"c{kind}\n".encode() + _text(str(number)) + _text("cpu")
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    made = b"(" + b"(" + storage + _int(count) + b"tQ" + _int(0)
    made += _ints(shape) + _ints(strides) + b"\x89" + _ORDERED
    if is_typed:
        return b"ctorch._utils\n_rebuild_tensor_v2\n" + made + b"tR"
    made += f"ctorch\n{TORCH_NAMES[dtype]}\n".encode()
    return b"ctorch._utils\n_rebuild_tensor_v3\n" + made + b"tR"


def paddle_parts(tensors: Sequence[Described]) -> list[bytes]:
    """What stands before, between and behind the tensors of a `.pdparams`."""
    parts, before = [], b"\x80\x04}("
    for key, dtype, shape in tensors:
        if dtype not in NUMPY_NAMES:
            raise WeightConvertError(
                f"{key} is {dtype}, which .pdparams cannot hold; dequantise or cast it first"
            )
        array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _ints((0,))
        array += b"C\x01btR(" + _int(1) + _ints(shape)
        kind = _text(NUMPY_NAMES[dtype]) + b"\x89\x88\x87R"
        order = _text("|" if NUMPY_NAMES[dtype].endswith("1") else "<")
        array += b"cnumpy\ndtype\n" + kind + b"(" + _int(3) + order + b"NNN"
        array += _int(-1) + _int(-1) + _int(0) + b"tb\x89"
        size_bytes = tensor_size_bytes(dtype, shape)
        parts.append(before + _text(key) + array + b"\x8e" + struct.pack("<Q", size_bytes))
        before = b"tb"
    return [*parts, before + _text(NAMES_KEY) + b"}u."]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """A tensor of a distributed checkpoint: where its own file lies in a `.distcp`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    size_bytes: int


def dcp_pickle(items: Sequence[StoredItem]) -> bytes:
    """`.metadata` of whole tensors, each one box."""
    room = "torch.distributed.checkpoint.metadata"
    described, stored, paths = b"", b"", b""
    for item in items:
        none = _size((0,) * len(item.shape))
        properties = f"ctorch\n{TORCH_NAMES[item.dtype]}\n".encode()
        properties += b"ctorch.serialization\n_get_layout\n" + _text("torch.strided") + b"\x85R"
        properties += b"\x89" + f"c{room}\n_MEM_FORMAT_ENCODING\n".encode() + _int(0) + b"\x85R\x89"
        chunk = _object(room, "ChunkStorageMetadata", offsets=none, sizes=_size(item.shape))
        described += _text(item.key) + _object(
            room,
            "TensorStorageMetadata",
            properties=f"c{room}\nTensorProperties\n".encode() + b")\x81(" + properties + b"tb",
            size=_size(item.shape),
            chunks=b"](" + chunk + b"e",
        )
        paths += _text(item.key) + _text(item.key) + b"\x85"
        stored += _object(room, "MetadataIndex", fqn=_text(item.key), offset=none, index=_int(0))
        stored += _object(
            "torch.distributed.checkpoint.filesystem",
            "_StorageInfo",
            relative_path=_text(item.file),
            offset=_int(item.offset_bytes),
            length=_int(item.size_bytes),
            transform_descriptors=b"N",
        )
    metadata = _object(
        room,
        "Metadata",
        state_dict_metadata=b"}(" + described + b"u",
        planner_data=b"}(" + paths + b"u",
        storage_data=b"}(" + stored + b"u",
        storage_meta=b"N",
        version=b"N",
    )
    return b"\x80\x02" + metadata + b"."


def _object(module: str, name: str, **fields: bytes) -> bytes:
    state = b"".join(_text(key) + value for key, value in fields.items())
    return f"c{module}\n{name}\n".encode() + b")\x81}(" + state + b"ub"


def _size(shape: Sequence[int]) -> bytes:
    return b"ctorch\nSize\n" + _ints(shape) + b"\x85R"


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _ints(values: Sequence[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"


def _int(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

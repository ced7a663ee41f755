"""The tensors of a `.pdparams` file as byte ranges; nothing of its pickle is run.

Paddle pickles a dict of numpy arrays and, under `StructuredToParameterName@@`, other names of them.
bfloat16 stands as uint16, which Paddle has no tensors of.

    entries, skipped = read_paddle_file(Path("model_state.pdparams"))
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weight_convert._entries import TensorEntry, tensor_size_bytes
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.pickles.reading import Blob, Call, read_pickle

NAMES_KEY = "StructuredToParameterName@@"
_NUMPY_DTYPES: Mapping[str, str] = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "i2": "I16",
    "u2": "BF16",
    "f2": "F16",
    "i4": "I32",
    "f4": "F32",
    "i8": "I64",
    "f8": "F64",
    "c8": "C64",
}
NUMPY_NAMES: Mapping[str, str] = {stored: name for name, stored in _NUMPY_DTYPES.items()}
_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_TUPLES = ("builtins.tuple", "__builtin__.tuple")
_PADDLE_GLOBALS = frozenset(
    {
        "collections.OrderedDict",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
        *_ARRAYS,
        *_TUPLES,
    }
)


def read_paddle_file(path: Path) -> tuple[list[TensorEntry], list[str]]:
    """The tensors of a dict of arrays, and the names of what else it holds.

    Raises:
        CorruptFileError: no pickle of such a dict, one that is damaged, or one that holds code.
        WeightConvertError: arrays that do not lie in one piece in the file.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        state = read_pickle(file, path, allowed=_PADDLE_GLOBALS)
    if not isinstance(state, dict):
        raise CorruptFileError(f"{path} holds a {type(state).__name__}, no dict of tensors")
    entries, skipped = [], []
    for key, value in state.items():
        array = _array_of(value)
        if array is not None:
            entries.append(_paddle_entry(path, str(key), array))
        elif key != NAMES_KEY:
            skipped.append(str(key))
    return entries, skipped


def _array_of(value: Any) -> Call | None:
    """The array itself; paddle.save of a tensor outside of a layer's dict puts its name before."""
    if isinstance(value, Call) and value.name in _TUPLES and value.args:
        value = value.args[0]
    if isinstance(value, tuple) and len(value) == 2:
        value = value[1]
    return value if isinstance(value, Call) and value.name in _ARRAYS else None


def _paddle_entry(path: Path, key: str, array: Call) -> TensorEntry:
    state = array.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[1], tuple):
        raise CorruptFileError(f"{path}: {key} is no array that numpy pickles")
    _, shape, dtype, is_fortran, data = state
    if not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise CorruptFileError(f"{path}: {key} has shape {shape}")
    if not isinstance(dtype, Call) or not dtype.args or not isinstance(dtype.args[0], str):
        raise CorruptFileError(f"{path}: {key} has no dtype that numpy pickles")
    name = dtype.args[0]
    if isinstance(dtype.state, tuple) and dtype.state[1:2] not in (("<",), ("|",)):
        raise CorruptFileError(f"{path}: {key} is of big endian")
    if name not in _NUMPY_DTYPES:
        raise CorruptFileError(f"{path}: {key} has the numpy dtype {name!r}, which no tensor has")
    if not isinstance(data, Blob) or (is_fortran and len(shape) > 1):
        raise WeightConvertError(
            f"{path}: {key} does not lie in one piece in the file; save it with "
            f"paddle.save(..., protocol=4) from arrays in row-major order"
        )
    expected = tensor_size_bytes(_NUMPY_DTYPES[name], shape)
    if data.size_bytes != expected:
        raise CorruptFileError(f"{path}: {key} {list(shape)} has {data.size_bytes} bytes")
    return TensorEntry(
        key=key,
        dtype=_NUMPY_DTYPES[name],
        shape=shape,
        offset_bytes=data.offset_bytes,
        size_bytes=expected,
    )

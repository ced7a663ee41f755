"""Token ids that were made elsewhere: raw `.bin`, `.npy`, safetensors, Megatron's indexed format.

Nothing is added to them. Rows of a matrix and the documents of an index are documents; a line of
numbers is cut behind each token that ends a document.

    array = open_array(file, dtype="uint16")
    check_ids(array.ids[:1000], vocab_size, file, first=0)
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_train.errors import TrainValueError
from moe_train.reading.formats import DataFile

MASK_FIELD = "loss_mask"
"""Where a file or row says which of its tokens are targets."""
LABELS, ATTENTION = "labels", "attention_mask"
"""Where rows say it as the models of transformers read it."""

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_SAFETENSORS = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenArray:
    """The ids of a file, mapped.

    Attributes:
        ids: [N], any kind of integer.
        trained: [N], nonzero where a token is a target; None: everywhere.
        borders: where documents begin and, last, N: int64 [D + 1]; None: behind end tokens.
    """

    ids: NDArray[Any]
    trained: NDArray[Any] | None
    borders: NDArray[np.int64] | None


def open_array(file: DataFile, dtype: str) -> TokenArray:
    """Map the ids of a file.

    Args:
        dtype: the numbers of a raw .bin file.

    Raises:
        ValueError: the file is not of its format, or its numbers are no integers.
    """
    if file.format == "bin":
        return _raw(file, dtype)
    if file.format == "npy":
        return _npy(file)
    return _megatron(file) if file.format == "megatron" else _safetensors(file)


def check_ids(ids: NDArray[Any], vocab_size: int, file: DataFile, first: int) -> None:
    """Refuse ids outside of the vocabulary; `first` is the place of the first of them.

    Raises:
        ValueError: names the file, the place and the id.
    """
    wrong = (ids < 0) | (ids >= vocab_size) if ids.dtype.kind == "i" else ids >= vocab_size
    if wrong.any():
        index = int(wrong.argmax())
        raise TrainValueError(
            f"{file.shown}: token {first + index} is {int(ids[index])}, but the tokenizer has "
            f"{vocab_size} tokens; give the tokenizer that made the file (tokenizer.file), or the "
            "dtype that it was written with"
        )


def _raw(file: DataFile, dtype: str) -> TokenArray:
    item = np.dtype(dtype).newbyteorder("<")
    if file.size_bytes % item.itemsize:
        raise TrainValueError(
            f"{file.shown} has {file.size_bytes} bytes, which is no whole number of {dtype} tokens "
            f'of {item.itemsize} bytes; set "dtype" of the source, or copy the file again'
        )
    return TokenArray(ids=_mapped(file.path, item), trained=None, borders=None)


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r")


def _npy(file: DataFile) -> TokenArray:
    try:
        values = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TrainValueError(f"{file.shown} is not a whole .npy file: {error}") from error
    if not isinstance(values, np.ndarray):
        raise TrainValueError(f"{file.shown} is an archive, expected one array; save it by np.save")
    return _shaped(file, values, None)


def _shaped(file: DataFile, ids: NDArray[Any], trained: NDArray[Any] | None) -> TokenArray:
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise TrainValueError(
            f"{file.shown} holds {ids.dtype} of shape {list(ids.shape)}, expected whole numbers of "
            "shape [tokens] or [documents, tokens]"
        )
    if trained is not None and trained.shape != ids.shape:
        raise TrainValueError(
            f"{file.shown}: {MASK_FIELD} has shape {list(trained.shape)} and input_ids "
            f"{list(ids.shape)}; give one number for each token"
        )
    borders = None
    if ids.ndim == 2:
        borders = np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
    flat_mask = None if trained is None else trained.reshape(-1)
    return TokenArray(ids=ids.reshape(-1), trained=flat_mask, borders=borders)


def _safetensors(file: DataFile) -> TokenArray:
    try:
        with file.path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, file.size_bytes)))
        names = sorted(name for name in header if name != "__metadata__")
        wanted = ("input_ids", MASK_FIELD, ATTENTION)
        entries = {name: header[name] for name in wanted if name in header}
        found = {name: _tensor(file, entry, 8 + length) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainValueError(
            f"{file.shown} is not a whole safetensors file of whole numbers: "
            f"{type(error).__name__}: {error}"
        ) from error
    if "input_ids" not in found:
        raise TrainValueError(
            f'{file.shown} has no tensor "input_ids"; it has {", ".join(names) or "none"}'
        )
    _check_none_is_ignored(file, names, found.get(ATTENTION))
    return _shaped(file, found["input_ids"], found.get(MASK_FIELD))


def _check_none_is_ignored(
    file: DataFile, names: Sequence[str], attention: NDArray[Any] | None
) -> None:
    if LABELS in names and MASK_FIELD not in names:
        raise TrainValueError(
            f"{file.shown} has {LABELS}, which are read of JSONL and Parquet rows; store "
            f"{MASK_FIELD} instead (1 where a token is a target)"
        )
    if attention is not None and not attention.all():
        raise TrainValueError(
            f"{file.shown}: {ATTENTION} has zeros, and padding is no document's; store documents "
            "without it, or write rows of JSONL or Parquet, whose padding is left out"
        )


def _tensor(file: DataFile, entry: Mapping[str, Any], data_start: int) -> NDArray[Any]:
    """One tensor of a safetensors file, mapped; the library would read it whole."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    dtype = np.dtype(_SAFETENSORS[entry["dtype"]])
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise TrainValueError(f"{stop - start} bytes for shape {list(shape)} of {entry['dtype']}")
    return np.memmap(file.path, dtype, "r", data_start + start, shape)


def _megatron(file: DataFile) -> TokenArray:
    index_path = Path(file.shown).with_suffix(".idx")
    try:
        data = index_path.read_bytes()
    except OSError as error:
        raise TrainValueError(f"{file.shown}: its index cannot be read: {error}") from error
    header = data[: _INDEX_HEADER.size]
    fits = len(header) == _INDEX_HEADER.size and header.startswith(_INDEX_MAGIC)
    if not fits:
        raise TrainValueError(f"{index_path} is not an index of Megatron's (MMIDIDX)")
    _, version, code, num_sequences, num_borders = _INDEX_HEADER.unpack(header)
    size = _INDEX_HEADER.size + 12 * num_sequences + 8 * num_borders
    if version != 1 or code not in _INDEX_DTYPES or len(data) not in (size, size + num_sequences):
        raise TrainValueError(
            f"{index_path} is damaged or of another version: version {version}, dtype code {code}, "
            f"{len(data)} bytes where {num_sequences} sequences and {num_borders} borders need "
            f"{size}; copy it again"
        )
    dtype = np.dtype(_INDEX_DTYPES[code])
    at = _INDEX_HEADER.size
    lengths = np.frombuffer(data, "<i4", num_sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", num_sequences, at + 4 * num_sequences)
    documents = np.frombuffer(data, "<i8", num_borders, at + 12 * num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    whole = int(ends[-1]) * dtype.itemsize == file.size_bytes
    in_order = whole and np.array_equal(pointers, ends[:-1] * dtype.itemsize)
    in_order = in_order and num_borders > 0 and documents[0] == 0
    if not in_order or documents[-1] != num_sequences or (np.diff(documents) < 0).any():
        raise TrainValueError(
            f"{index_path} does not describe {file.shown}: {int(ends[-1])} tokens of "
            f"{dtype.itemsize} bytes one after another, and the file has {file.size_bytes} bytes; "
            "use the two files that were written together"
        )
    return TokenArray(ids=_mapped(file.path, dtype), trained=None, borders=ends[documents])

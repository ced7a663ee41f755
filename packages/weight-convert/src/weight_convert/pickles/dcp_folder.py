"""The tensors of a torch.distributed.checkpoint directory, as byte ranges of its files.

`.metadata` is a pickle that says which box of which tensor lies where; each box is one file of
`torch.save` inside a `.distcp`. Boxes of one tensor are put in order here, row by row where they
are cut along an inner dim, so that what follows sees whole tensors.

    tensors, files, skipped = read_dcp(Path("checkpoint"))
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from weight_convert._entries import tensor_size_bytes
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.pickles.reading import Call, Named, read_pickle
from weight_convert.pickles.torch_file import TORCH_NAMES, dtype_of, read_torch_file

METADATA_NAME = ".metadata"
_ROOM = "torch.distributed.checkpoint."
_DCP_GLOBALS = frozenset(
    {
        *(
            f"{_ROOM}metadata.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_ROOM}filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "pathlib.PurePosixPath",
        *(f"torch.{name}" for name in TORCH_NAMES.values()),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensor:
    """A tensor in `ranges`: (file, offset, bytes), in the order of its elements."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a box of a tensor lies, as one file of torch.save inside another file."""

    offset: tuple[int, ...]
    file: str
    begin: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int


def read_dcp(directory: Path) -> tuple[list[PlacedTensor], tuple[str, ...], list[str]]:
    """The model's tensors, the files that hold them, and the names of everything else.

    Of a checkpoint that holds several states, the model is the one that is called so.

    Raises:
        CorruptFileError: a damaged directory, or metadata that name code.
        WeightConvertError: boxes that do not tile a tensor, or files that are transformed.
    """
    path = directory / METADATA_NAME
    with path.open("rb") as file:
        state = _state(read_pickle(file, path, allowed=_DCP_GLOBALS))
    described, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CorruptFileError(f"{path} is not the metadata of a distributed checkpoint")
    places = _places(path, stored)
    names = _model_names(described, state.get("planner_data"))
    tensors = [
        _tensor(directory, key, name, described[key], places.get(key, []))
        for key, name in names.items()
    ]
    files = tuple(sorted({name for tensor in tensors for name, _, _ in tensor.ranges}))
    return tensors, files, [str(key) for key in described if key not in names]


def _state(value: Any) -> Mapping[str, Any]:
    """The fields of a dataclass as pickle keeps them."""
    state = value.state if isinstance(value, Call) else None
    return state if isinstance(state, dict) else {}


def _sizes(value: Any) -> tuple[int, ...]:
    found = value.args[0] if isinstance(value, Call) and value.args else ()
    if not isinstance(found, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in found):
        raise CorruptFileError(f"{METADATA_NAME} has the shape {found}")
    return found


def _model_names(described: Mapping[Any, Any], paths: Any) -> dict[Any, str]:
    """Of each tensor of the model, its name in the model."""
    is_tensor = {k: "chunks" in _state(v) for k, v in described.items()}
    paths = paths if isinstance(paths, dict) else {}
    of = {key: paths.get(key, (key,)) for key, yes in is_tensor.items() if yes}
    tops = {path[0] for path in of.values() if isinstance(path, tuple) and len(path) > 1}
    top = next((name for name in ("model", "state_dict", "module") if name in tops), None)
    if top is None:
        return {key: str(key) for key in of}
    return {
        key: ".".join(map(str, path[1:]))
        for key, path in of.items()
        if len(path) > 1 and path[0] == top
    }


def _places(path: Path, stored: Mapping[Any, Any]) -> dict[str, list[_Place]]:
    """Where the boxes of each tensor lie; their shapes are not known yet."""
    places: dict[str, list[_Place]] = {}
    for index, info in stored.items():
        key, offset, where = _state(index).get("fqn"), _state(index).get("offset"), _state(info)
        name, numbers = where.get("relative_path"), (where.get("offset"), where.get("length"))
        if not isinstance(name, str) or PurePosixPath(name).name != name:
            raise CorruptFileError(f"{path}: {key} is said to be in {name!r}, not a file name")
        begin, size_bytes = (n if type(n) is int and 0 <= n < 2**62 else -1 for n in numbers)
        if min(begin, size_bytes) < 0:
            raise CorruptFileError(f"{path}: {key} is said to be at {numbers}")
        if where.get("transform_descriptors"):
            raise WeightConvertError(f"{path}: {key} is compressed; save without extensions")
        places.setdefault(str(key), []).append(
            _Place(
                offset=() if offset is None else _sizes(offset),
                file=name,
                begin=begin,
                size_bytes=size_bytes,
            )
        )
    return places


def _tensor(
    directory: Path, key: Any, name: str, described: Any, found: Sequence[_Place]
) -> PlacedTensor:
    fields = _state(described)
    told = fields.get("properties")
    properties = told.state if isinstance(told, Call) else None
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    stored = dtype_of(dtype.name) if isinstance(dtype, Named) else None
    shape = _sizes(fields.get("size"))
    if stored is None:
        raise CorruptFileError(f"{directory / METADATA_NAME}: {key} has the dtype {dtype}")
    chunks = fields["chunks"] if isinstance(fields["chunks"], list) else []
    sizes = {
        _sizes(_state(chunk).get("offsets")): _sizes(_state(chunk).get("sizes")) for chunk in chunks
    }
    boxes = []
    for place in found:
        if not (directory / place.file).is_file():
            raise CorruptFileError(f"{directory / place.file} is missing, and {key} is in it")
        (entry,), _ = read_torch_file(directory / place.file, place.begin, place.size_bytes)
        box_shape = sizes.get(place.offset)
        fits = box_shape is not None and len(shape) == len(box_shape) == len(place.offset)
        if not fits or (entry.dtype, entry.shape) != (stored, box_shape):
            raise CorruptFileError(
                f"{directory / place.file}: {key} has {entry.dtype} {list(entry.shape)} at "
                f"{place.offset}, but {METADATA_NAME} says {stored} {box_shape}"
            )
        boxes.append(
            _Box(
                offset=place.offset,
                shape=entry.shape,
                file=place.file,
                begin=entry.offset_bytes,
            )
        )
    ranges = _ranges(directory, name, stored, shape, boxes)
    return PlacedTensor(key=name, dtype=stored, shape=shape, ranges=ranges)


def _ranges(
    directory: Path, key: str, dtype: str, shape: tuple[int, ...], boxes: Sequence[_Box]
) -> tuple[tuple[str, int, int], ...]:
    """The boxes' bytes in the order of the whole tensor."""
    element = tensor_size_bytes(dtype, (1,))
    rows: list[tuple[int, str, int, int]] = []
    for box in boxes:
        inner = len(shape)  # the dims from here on are whole, so that one run spans them
        while inner and box.shape[inner - 1] == shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        length = math.prod(box.shape[inner:])
        outer = itertools.product(*(range(n) for n in box.shape[:inner]))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        for number, place in enumerate(outer):
            full = [*(a + b for a, b in zip(place, box.offset, strict=False))]
            full += box.offset[inner:]
            begin = sum(a * b for a, b in zip(full, strides, strict=True))
            if length:
                rows.append((begin, box.file, box.begin + number * length * element, length))
    rows.sort()
    end = 0
    for begin, _, _, length in rows:
        if begin != end:
            raise WeightConvertError(
                f"{directory}: the parts of {key} leave a hole or overlap at element "
                f"{min(begin, end)}; is a rank's file missing?"
            )
        end = begin + length
    if end != math.prod(shape):
        raise WeightConvertError(f"{directory}: the parts of {key} end at {end} of {shape}")
    return tuple((file, offset, length * element) for _, file, offset, length in rows)

"""What a model directory holds: every tensor with its place on disk, and every other file.

One look at the headers, the index and `config.json` gives all that planning needs; no tensor data
is read. Problems of a directory are found here, before anything is written.

Invariant: each tensor of each weight file stands in the catalog once; a tensor that the index
names is really in the file that the index names.

    catalog = read_catalog(Path("Qwen3-30B-A3B"))
    len(catalog.tensors), catalog.config["model_type"]
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from weight_convert._checks import Record, checked_path
from weight_convert._entries import TensorEntry
from weight_convert._kinds import INDEX_NAMES, SINGLE_NAMES, FileKind
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files.header import read_header
from weight_convert.pickles import METADATA_NAME, read_dcp, read_paddle_file, read_torch_file

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
DEEPSEEK_NAME = "model0-mp1.safetensors"  # of DeepSeek's own inference code, on one rank
_NO_MODEL = "no tensor of a model"
_WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".pdparams", ".distcp"}
)
# Checksums of the source's files, which would be false for the output.
_STALE_NAMES = frozenset({"manifest.json"})
# What resumes a run belongs to the source's tensors; beside others it would resume nothing.
_TRAINING_STATE = re.compile(
    r"(random_state-|rng_state|rng-rank-|optimizer|master_weights|scheduler|scaler\.|samples\.json"
    r"|trainer_state|training_args|node_layout).*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor(TensorEntry):
    """One stored tensor of a directory.

    Attributes:
        file: indexes `Catalog.files`.
        ranges: (file, offset, bytes) of its parts in order, where it lies in several.
    """

    file: int
    ranges: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or folder of the source that is not carried into the output, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog(Record):
    """A model directory as read by `read_catalog`.

    Attributes:
        directory: the directory.
        kind: of its weight files.
        files: their names.
        tensors: every stored tensor by key.
        metadata: the union of the weight files' free-form metadata.
        index_metadata: the index's `metadata`; None without an index.
        config: the parsed `config.json`; empty when there is none.
        carried: (name relative to the directory, bytes) of the files that a conversion copies.
        left_out: what a conversion does not copy.
    """

    directory: Path
    kind: FileKind
    files: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, str]
    index_metadata: Mapping[str, Any] | None
    config: Mapping[str, Any]
    carried: tuple[tuple[str, int], ...]
    left_out: tuple[LeftOut, ...]


def read_catalog(directory: Path | str) -> Catalog:
    """Read the headers, the index and `config.json` of a model directory.

    Raises:
        WeightConvertError: no such directory, or no safetensors weights under the names that
            transformers uses; weight files whose metadata contradict each other.
        CorruptFileError: a damaged weight file, index or config; a tensor that the index names but
            the file lacks; a tensor stored twice.
    """
    directory = _checked_directory(directory)
    kind = _kind_of(directory)
    weights = _read_distributed(directory) if kind == "dcp" else _read_files(directory, kind)
    ignored = frozenset({*weights.files, INDEX_NAMES.get(kind, METADATA_NAME)})
    carried, left_out = _other_files(directory, ignored)
    return Catalog(
        directory=directory,
        kind=kind,
        files=weights.files,
        tensors=weights.tensors,
        metadata=weights.metadata,
        index_metadata=weights.index_metadata,
        config=_read_json_object(directory / CONFIG_NAME, required=False),
        carried=carried,
        left_out=left_out + weights.left_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """What the weight files of a directory hold."""

    files: tuple[str, ...]
    tensors: Mapping[str, SourceTensor]
    metadata: Mapping[str, str]
    index_metadata: Mapping[str, Any] | None
    left_out: tuple[LeftOut, ...]


def _kind_of(directory: Path) -> FileKind:
    """The kind of weight files of a directory: safetensors where there are several kinds."""
    for kind, single in SINGLE_NAMES.items():
        if (directory / single).exists() or (directory / INDEX_NAMES[kind]).exists():
            return kind
    if (directory / METADATA_NAME).is_file():
        return "dcp"
    if (directory / DEEPSEEK_NAME).exists():
        return "safetensors"
    found = sorted(entry.name for entry in directory.iterdir())[:8]
    known = ", ".join((*SINGLE_NAMES.values(), DEEPSEEK_NAME))
    raise WeightConvertError(
        f"{directory} has no weights that are read here ({known}, the index of several such files, "
        f"or {METADATA_NAME} of torch's distributed checkpoints); it holds: "
        f"{', '.join(found) or 'nothing'}"
    )


def _read_files(directory: Path, kind: FileKind) -> _Weights:
    index = _read_index(directory, kind)
    single = SINGLE_NAMES[kind]
    if kind == "safetensors" and index is None and not (directory / single).exists():
        single = DEEPSEEK_NAME
    files = tuple(sorted(set(index["weight_map"].values()))) if index else (single,)
    tensors, metadata, left_out = _read_tensors(directory, files, kind)
    if index is not None:
        _check_index(directory / INDEX_NAMES[kind], index["weight_map"], tensors, files)
    return _Weights(
        files=files,
        tensors=tensors,
        metadata=metadata,
        index_metadata=None if index is None else index["metadata"],
        left_out=left_out,
    )


def _read_distributed(directory: Path) -> _Weights:
    placed, files, others = read_dcp(directory)
    tensors = {}
    for tensor in placed:
        ranges = tuple((files.index(name), at, n) for name, at, n in tensor.ranges)
        file, offset, _ = ranges[0] if ranges else (0, 0, 0)
        tensors[tensor.key] = SourceTensor(
            key=tensor.key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            file=file,
            offset_bytes=offset,
            size_bytes=sum(n for _, _, n in ranges),
            ranges=ranges if len(ranges) > 1 else (),
        )
    left_out = (
        (LeftOut(name=f"{len(others)} entries of {METADATA_NAME}", reason=_NO_MODEL),)
        if others
        else ()
    )
    return _Weights(
        files=files, tensors=tensors, metadata={}, index_metadata=None, left_out=left_out
    )


def read_frame(directory: Path | str, ignored: frozenset[str]) -> Catalog:
    """What a directory has beside weights that stand elsewhere: config and files to carry.

    Args:
        directory: the directory.
        ignored: names in it that are neither carried nor left out.

    Raises:
        WeightConvertError: no such directory.
        CorruptFileError: a damaged config.
    """
    directory = _checked_directory(directory)
    carried, left_out = _other_files(directory, ignored)
    return Catalog(
        directory=directory,
        kind="safetensors",
        files=(),
        tensors={},
        metadata={},
        index_metadata=None,
        config=_read_json_object(directory / CONFIG_NAME, required=False),
        carried=carried,
        left_out=left_out,
    )


def _checked_directory(directory: Path | str) -> Path:
    """Return the path of a directory that is there."""
    path = checked_path(directory)
    if not path.is_dir():
        raise WeightConvertError(f"{path} is not a directory; give a model directory")
    return path


def _read_json_object(path: Path, *, required: bool) -> dict[str, Any]:
    """Return the JSON object in `path`; an absent file that is not required reads as {}."""
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _read_index(directory: Path, kind: FileKind) -> dict[str, Any] | None:
    """Return the checked index (`metadata` always present), or None for a single-file model."""
    path, single = directory / INDEX_NAMES[kind], directory / SINGLE_NAMES[kind]
    if not path.exists():
        return None
    index = _read_json_object(path, required=True)
    weight_map = index.get("weight_map")
    metadata = index.setdefault("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise CorruptFileError(f"{path} has no weight_map, or its metadata is not an object")
    for key, name in weight_map.items():
        if not isinstance(name, str) or PurePosixPath(name).name != name:
            raise CorruptFileError(f"{path}: {key} is said to be in {name!r}, not a file name")
    if single.exists() and single.name not in weight_map.values():
        raise WeightConvertError(
            f"{directory} has two sets of weights, {single.name} and the files of {path.name}; "
            f"remove one of them"
        )
    return index


def _read_tensors(
    directory: Path, files: Sequence[str], kind: FileKind
) -> tuple[dict[str, SourceTensor], dict[str, str], tuple[LeftOut, ...]]:
    """Read every file; return all tensors by key, the union of metadata, and what is no tensor."""
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, str] = {}
    left_out: list[LeftOut] = []
    for number, name in enumerate(files):
        path = directory / name
        if not path.is_file():
            raise CorruptFileError(f"{path} is missing, although {INDEX_NAMES[kind]} names it")
        entries, of_file, skipped = _read_file(path, kind)
        left_out += [LeftOut(name=f"{key} of {name}", reason=_NO_MODEL) for key in skipped]
        for entry in entries:
            if entry.key in tensors:
                other = files[tensors[entry.key].file]
                raise CorruptFileError(
                    f"{directory}: {entry.key} is stored in both {other} and {name}; "
                    f"remove one of them"
                )
            tensors[entry.key] = SourceTensor(
                key=entry.key,
                dtype=entry.dtype,
                shape=entry.shape,
                file=number,
                offset_bytes=entry.offset_bytes,
                size_bytes=entry.size_bytes,
            )
        for key, value in of_file.items():
            if metadata.setdefault(key, value) != value:
                raise WeightConvertError(
                    f"{path}: metadata {key!r} is {value!r}, but {metadata[key]!r} in another "
                    f"file; output files hold tensors of both, so neither can be carried"
                )
    return tensors, metadata, tuple(left_out)


def _read_file(
    path: Path, kind: FileKind
) -> tuple[Sequence[TensorEntry], Mapping[str, str], Sequence[str]]:
    """Tensors and metadata of one file, and the names of what is no tensor."""
    if kind == "safetensors":
        header = read_header(path)
        return header.tensors, header.metadata, ()
    entries, skipped = read_torch_file(path) if kind == "bin" else read_paddle_file(path)
    return entries, {}, skipped


def _check_index(
    path: Path,
    weight_map: Mapping[str, str],
    tensors: Mapping[str, SourceTensor],
    files: Sequence[str],
) -> None:
    """Raise unless every tensor of the index is in the file that the index names."""
    for key, name in weight_map.items():
        found = tensors.get(key)
        if found is None or files[found.file] != name:
            where = "no file has it" if found is None else f"it is in {files[found.file]}"
            raise CorruptFileError(f"{path} says {key} is in {name}, but {where}")


def _other_files(
    directory: Path, weights: frozenset[str]
) -> tuple[tuple[tuple[str, int], ...], tuple[LeftOut, ...]]:
    """Sort everything else of the directory into files to carry and what to leave out."""
    carried: list[tuple[str, int]] = []
    left_out: list[LeftOut] = []
    for path in sorted(directory.iterdir()):
        if path.name in weights:
            continue
        if path.name in _STALE_NAMES:
            reason = "it describes the source's files"
        elif path.name.startswith("."):
            reason = "hidden"
        elif path.is_file() and _TRAINING_STATE.fullmatch(path.name):
            reason = "state of a training run, which the output cannot resume"
        elif path.is_file() and (
            path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        ):
            reason = "weights that no index read here names"
        elif path.is_file():
            carried.append((path.name, path.stat().st_size))
            continue
        elif path.is_dir() and not path.is_symlink():
            inner = sorted(entry for entry in path.rglob("*") if entry.is_file())
            if not any(entry.suffix in _WEIGHT_SUFFIXES for entry in inner):
                carried += [
                    (str(entry.relative_to(directory)), entry.stat().st_size) for entry in inner
                ]
                continue
            reason = "a folder with weights of its own"
        else:
            reason = "neither a file nor a folder"
        left_out.append(LeftOut(name=path.name, reason=reason))
    return tuple(carried), tuple(left_out)

"""Read the pickles of a DCP checkpoint without running what they name.

DCP keeps its metadata, and every value that is no tensor, as pickles, which can call any function.
Here they may name only what DCP's own metadata, and plain values, are made of; of all else the
error says the name. Whoever trusts the checkpoint's writer can allow everything.

    metadata = read_metadata(Path("dcp/step-10"), trusted=False)
"""

import importlib
import importlib.util
import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.serialization import safe_globals

from unified_ckpt.errors import CheckpointTypeError, CorruptCheckpointError, LoadError
from unified_ckpt.files.format import check_name

METADATA_NAME = ".metadata"
_REMEDY = (
    "if you trust whoever wrote this checkpoint, allow it with --trust-pickles (trusted=True), "
    "which lets its pickles run any code"
)
_DCP = "torch.distributed.checkpoint."
_KNOWN = frozenset(
    {
        *(
            (f"{_DCP}metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_DCP}filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
    }
)
_NUMPY = ("_reconstruct", "scalar")
# What torch and pickle raise of bytes that are not what they expect.
BROKEN = (
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    ImportError,
    pickle.UnpicklingError,
)


class _Unpickler(pickle.Unpickler):
    """Finds what DCP's metadata is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron.") and name == "MCoreMetadata":
            return Metadata  # with more attributes, which `left_out` names
        if module == "pathlib._local":  # of Python 3.13, which others lack
            module = "pathlib"
        known = (module, name) in _KNOWN
        if not known and module == "torch":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise CheckpointTypeError(f"names {module}.{name}, which DCP's metadata does not need")
        return super().find_class(module, name)


def read_metadata(folder: Path, *, trusted: bool) -> Metadata:
    """Return the metadata of a DCP checkpoint, checked for what a conversion needs of it.

    Raises:
        LoadError: there is no DCP checkpoint that all ranks wrote together.
        CheckpointTypeError: it names what it should not, and is not trusted.
        CorruptCheckpointError: it is damaged.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        found = [*folder.glob(f"__*{METADATA_NAME}")] if folder.is_dir() else []
        why = "was written without collectives, each rank by itself" if found else "is none"
        raise LoadError(
            f"{folder} {why}: expected a directory that torch.distributed.checkpoint has written, "
            f"with a file {METADATA_NAME}; name that directory"
        )
    raw = path.read_bytes()
    try:
        metadata = pickle.loads(raw) if trusted else _Unpickler(io.BytesIO(raw)).load()
    except CheckpointTypeError as error:
        raise CheckpointTypeError(f"{path}: {error}; {_REMEDY}") from error
    except BROKEN as error:
        raise CorruptCheckpointError(f"{path}: cannot be unpickled: {error!r}") from error
    for fault in _faults(metadata):
        raise CorruptCheckpointError(f"{path}: {fault}")
    return metadata  # type: ignore[no-any-return]


def _faults(metadata: Any) -> Iterator[str]:
    if not isinstance(metadata, Metadata):
        yield f"holds a {type(metadata).__name__}, no metadata of DCP"
        return
    if not isinstance(metadata.storage_data, Mapping):
        yield "does not say in which files things lie"
        return
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata | BytesStorageMetadata):
            yield f"{name!r} is a {type(stored).__name__}, neither a tensor nor an object"
    for index, info in metadata.storage_data.items():
        try:
            check_name(info.relative_path)
        except (ValueError, AttributeError, TypeError) as error:
            yield f"{getattr(index, 'fqn', index)!r}: {error}"


def load_object(name: str, raw: io.BytesIO, *, trusted: bool) -> Any:
    """Return a value that DCP pickled.

    Raises:
        CheckpointTypeError: it needs more than plain values, and is not trusted.
    """
    raw.seek(0)
    try:
        with safe_globals([io.BytesIO, frozenset, *_numpy_names()]):
            return torch.load(raw, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip() or str(error)
        said = reason.split("\n")[0].partition(" by default")[0]
        raise CheckpointTypeError(f"{name!r} is no plain value ({said}); {_REMEDY}") from error
    except BROKEN as error:
        raise CorruptCheckpointError(f"{name!r} cannot be unpickled: {error!r}") from error


def as_corrupt(where: str, error: Exception) -> Exception:
    """Return the error for something that torch could not read."""
    if isinstance(error, CorruptCheckpointError | CheckpointTypeError | LoadError):
        return error
    return CorruptCheckpointError(f"{where}: cannot be read: {str(error) or repr(error)}")


def _numpy_names() -> list[Any]:
    """Return what numpy's numbers and arrays are pickled with; none if it is not installed."""
    if importlib.util.find_spec("numpy") is None:
        return []
    np: Any = importlib.import_module("numpy")
    parts = getattr(np, "_core", None) or np.core
    kinds = [type(np.dtype(kind)) for kind in "?bhilqBHILQefdFD"]
    made = [(getattr(parts.multiarray, n), f"numpy.core.multiarray.{n}") for n in _NUMPY]
    return [np.ndarray, np.dtype, *kinds, *made, *(item for item, _ in made)]

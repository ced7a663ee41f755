"""A checkpoint directory opened for reading: its index, its headers and its other files.

A directory written by this package has a manifest, against which files are checked. A plain
transformers directory has none; it is read the same way, without checksums.

    index = read_index("run/checkpoint-10", "model")
    index["lm_head.weight"].shape
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from unified_ckpt.errors import CheckpointValueError, CorruptCheckpointError, LoadError, as_path
from unified_ckpt.files.checksums import crc32
from unified_ckpt.files.format import (
    FileRecord,
    HeaderEntry,
    Manifest,
    check_name,
    read_header,
    read_manifest,
)
from unified_ckpt.plans import StoredTensor


class Checkpoint:
    """A checkpoint directory opened for reading; it remembers the manifest and the headers.

    Raises:
        LoadError: there is no such directory.
        CorruptCheckpointError: its manifest is damaged.
    """

    def __init__(self, checkpoint_id: Path | str) -> None:
        self.folder = as_path("checkpoint_id", checkpoint_id)
        if not self.folder.is_dir():
            raise LoadError(f"{self.folder}: no such checkpoint directory")
        self.manifest: Manifest | None = read_manifest(self.folder)
        self._headers: dict[str, dict[str, HeaderEntry]] = {}

    def record(self, name: str) -> FileRecord | None:
        """Return the manifest's record of a file; None without a manifest."""
        if self.manifest is None:
            return None
        if name not in self.manifest.files:
            raise CorruptCheckpointError(f"{self.folder / name}: not listed in the manifest")
        return self.manifest.files[name]

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a small file, checked against the manifest where there is one."""
        path = self.folder / check_inside(name, self.folder)
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:
            if self.manifest is not None and name in self.manifest.files:
                raise CorruptCheckpointError(f"{path}: file is missing") from error
            raise LoadError(f"{self.folder} holds no file {name!r}") from error
        if self.manifest is not None and name in self.manifest.files:
            check_bytes(raw, self.manifest.files[name], path)
        return raw

    def files_of(self, part: str) -> Mapping[str, str] | str:
        """Return the index of a part (key to file), or the one file that holds it all."""
        index_name, file_name = f"{part}.safetensors.index.json", f"{part}.safetensors"
        if (self.folder / index_name).is_file():
            return self._read_weight_map(index_name)
        if (self.folder / file_name).is_file():
            return file_name
        for name in (index_name, file_name):
            if self.manifest is not None and name in self.manifest.files:
                raise CorruptCheckpointError(f"{self.folder / name}: file is missing")
        raise LoadError(
            f"{self.folder} holds no part {part!r} (neither {index_name} nor {file_name}); "
            f"it holds {list_parts(self.folder) or 'no part at all'}"
        )

    def _read_weight_map(self, index_name: str) -> dict[str, str]:
        path = self.folder / index_name
        try:
            weight_map = json.loads(self.read_file(index_name))["weight_map"]
            if not isinstance(weight_map, dict):
                raise CheckpointValueError("weight_map is not an object")
            return {key: check_inside(name, self.folder) for key, name in weight_map.items()}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path}: malformed index: {error!r}") from error

    def keys(self, part: str) -> list[str]:
        """Return the stored keys of a part, from its index or its one file's header."""
        where = self.files_of(part)
        return list(self._header(where) if isinstance(where, str) else where)

    def tensors(self, part: str, keys: Iterable[str] | None = None) -> dict[str, StoredTensor]:
        """Return the stored tensors of a part; with `keys` only those of them that it holds.

        Only the headers of files that hold a wanted key are read.
        """
        where = self.files_of(part)
        if isinstance(where, str):
            where = {key: where for key in self._header(where)}
        if keys is not None:
            where = {key: where[key] for key in keys if key in where}
        found = {}
        for key, name in where.items():
            entry = self._header(name).get(key)
            if entry is None:
                raise CorruptCheckpointError(
                    f"{self.folder / name}: the index says that it holds {key!r}, but it does not"
                )
            found[key] = StoredTensor(
                dtype=entry.dtype, shape=entry.shape, file=name, begin=entry.begin, end=entry.end
            )
        return found

    def _header(self, name: str) -> dict[str, HeaderEntry]:
        if name not in self._headers:
            path = self.folder / name
            record = self.record(name)
            raw, entries = read_header(path)
            if record is not None:
                check_bytes(raw, record, path, whole=False)
            self._headers[name] = {entry.key: entry for entry in entries}
        return self._headers[name]


def check_inside(name: str, folder: Path) -> str:
    """Return a file name of an index if it stays inside the directory."""
    try:
        return check_name(name)
    except ValueError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from error


def check_bytes(raw: bytes, record: FileRecord, path: Path, *, whole: bool = True) -> None:
    """Compare a file's bytes, or with `whole=False` its first ones, with the manifest's record."""
    if whole and len(raw) != record.num_bytes:
        raise CorruptCheckpointError(f"{path}: {len(raw)} bytes, expected {record.num_bytes}")
    view = memoryview(raw)
    for begin, length, crc in zip(record.begins, record.lengths, record.sums, strict=True):
        end = begin + length
        if end > len(raw):
            break  # they are in order
        if crc32(view[begin:end]) != crc:
            raise CorruptCheckpointError(f"{path}: bytes {begin} to {end} differ from the checksum")


def list_parts(folder: Path) -> list[str]:
    """Return the names of the parts that a directory holds."""
    names = {p.name for p in folder.iterdir()}
    suffixes = (".safetensors.index.json", ".safetensors")
    parts = {n.removesuffix(s) for n in names for s in suffixes if n.endswith(s)}
    return sorted(p for p in parts if not p.startswith(".") and "-" not in p and "." not in p)


def read_index(checkpoint_id: Path | str, part: str = "model") -> dict[str, StoredTensor]:
    """Return every stored tensor of a part: dtype, shape, file and byte range, by key.

    Raises:
        LoadError: no such directory or part.
        CorruptCheckpointError: an index or a header is damaged.
    """
    return Checkpoint(checkpoint_id).tensors(part)


def load_files(checkpoint_id: Path | str, name: str) -> bytes:
    """Return the bytes of a file saved with `files` or `rank_files`, checked where possible.

    Raises:
        LoadError: no such directory or file.
        CorruptCheckpointError: the file is damaged.
    """
    return Checkpoint(checkpoint_id).read_file(name)

"""A checkpoint directory opened for reading: its index, its headers and its other files.

A directory written by this package has a manifest, against which files are checked; what that does
not list is not part of the checkpoint. A plain transformers directory has none; it is read the same
way, without checksums.

A checkpoint has one identity: the directory that was opened, by its descriptor. If the name is
given to another directory meanwhile, or files are written to, reading ends in
`ReplacedCheckpointError`, never in a mix and never as damage.

    index = read_index("run/checkpoint-10", "model")
    index["lm_head.weight"].shape
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from glob import escape
from pathlib import Path
from typing import TypeVar

from unified_ckpt.errors import (
    CheckpointValueError,
    CorruptCheckpointError,
    LoadError,
    ReplacedCheckpointError,
    StoreError,
)
from unified_ckpt.files import OpenFolder, ReadFolder, read_at
from unified_ckpt.files.checksums import crc32
from unified_ckpt.files.format import (
    MANIFEST_NAME,
    FileRecord,
    HeaderEntry,
    Manifest,
    check_name,
    read_header,
    read_manifest,
)
from unified_ckpt.files.format.tables import ListedKeys, StoredKeys
from unified_ckpt.files.storage import LocalStore, Location, as_target
from unified_ckpt.plans import StoredTensor
from unified_ckpt.plans.checkpoint.stored_folder import StoredFolder, is_stored

_NUMBERED = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")
MOST_ATTEMPTS = 5  # each reads another checkpoint of that name
_ASIDE_POLL_S = 0.02
_ASIDE_POLLS = 50

_T = TypeVar("_T")


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """A checkpoint directory opened for reading; it remembers the manifest and the headers.

    A context manager: at its end what was read is of one checkpoint, or `ReplacedCheckpointError`
    is raised, also in place of an error that the replacement explains.

    Raises:
        LoadError: there is no such directory.
        CorruptCheckpointError: its manifest is damaged.
    """

    def __init__(self, checkpoint_id: Path | str | Location) -> None:
        self.folder = as_target("checkpoint_id", checkpoint_id)
        self.opened: ReadFolder
        if not isinstance(self.folder, Location):
            opened = _open(self.folder)
            if _lies_apart(opened):  # a save to file:// wrote it, and its reader finds the files
                opened.close()
                key = os.path.realpath(self.folder).lstrip("/")
                self.folder = Location(store=LocalStore("/"), key=key)
            else:
                self.opened = opened
        if isinstance(self.folder, Location):
            self.opened = StoredFolder(self.folder)
        try:
            self.manifest: Manifest | None = read_manifest(self.opened)
            if self.manifest is None and not self.opened.leads_here():
                raise CorruptCheckpointError(f"{self.folder / MANIFEST_NAME}: file is missing")
        except LoadError as error:
            self.__exit__(type(error), error, None)
            raise
        self._headers: dict[str, dict[str, HeaderEntry]] = {}
        self._keys: dict[str, StoredKeys | ListedKeys] = {}

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the directory; raise `ReplacedCheckpointError` if it was replaced or written to."""
        try:
            known = error is None or isinstance(error, LoadError)
            changed = self.opened.changed_file() if known else None
            if changed is not None:
                raise ReplacedCheckpointError(
                    f"{self.folder / changed} was written to while the checkpoint was read; load "
                    "it again when nobody writes there"
                ) from error
            if isinstance(error, LoadError) and not self.opened.leads_here():
                raise self.replaced() from error
        finally:
            self.opened.close()

    def replaced(self) -> ReplacedCheckpointError:
        """Return the error for a name that leads elsewhere by now."""
        what = "replaced" if exists(self.folder) else "removed"
        return ReplacedCheckpointError(
            f"{self.folder} was {what} while it was read; read it again, or another checkpoint"
        )

    @property
    def identity(self) -> str:
        """A text that differs between checkpoints with different contents, on any machine."""
        size = self.opened.size(MANIFEST_NAME)
        if size is None:
            return "no manifest"
        if isinstance(self.opened, StoredFolder):  # which holds it as it was when it was opened
            return f"{size} {self.opened.read(MANIFEST_NAME)[-32:].hex()}"
        end = bytearray(min(32, size))
        with self.opened.open(MANIFEST_NAME) as file:
            read_at(file, [memoryview(end)], size - len(end))
        return f"{size} {end.hex()}"

    def holds(self, name: str) -> bool:
        """Whether a file belongs to the checkpoint: its manifest lists it, or there is none."""
        if self.manifest is None:
            return self.opened.size(name) is not None
        return name in self.manifest.files

    def names(self) -> set[str]:
        """Return the names of all files of the checkpoint, relative to the directory."""
        return self.opened.names() if self.manifest is None else set(self.manifest.files)

    def parts(self) -> list[str]:
        """Return the names of the parts."""
        names = self.opened.listed() if self.manifest is None else self.manifest.files
        parts = {stem for n in names if (stem := _part_of(n))}
        return sorted(p for p in parts if not p.startswith(".") and not {*p} & {"-", ".", "/"})

    def record(self, name: str) -> FileRecord | None:
        """Return the manifest's record of a file; None without a manifest."""
        if self.manifest is None:
            return None
        if name not in self.manifest.files:
            raise CorruptCheckpointError(f"{self.folder / name}: not listed in the manifest")
        return self.manifest.files[name]

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a small file, checked against the manifest where it is listed."""
        path = self.folder / check_inside(name, self.folder)
        listed = None if self.manifest is None else self.manifest.files.get(name)
        if listed is None and self.opened.size(name) is None:
            raise LoadError(f"{self.folder} holds no file {name!r}")
        raw = self.opened.read(name)
        if listed is not None:
            check_bytes(raw, listed, path)
        return raw

    def stored_keys(self, part: str) -> StoredKeys | ListedKeys:
        """Return the keys of a part with their files: of its index, or of the one file's header."""
        if part not in self._keys:
            self._keys[part] = self._find_keys(part)
        return self._keys[part]

    def _find_keys(self, part: str) -> StoredKeys | ListedKeys:
        index_name, file_name = f"{part}.safetensors.index.json", f"{part}.safetensors"
        if self.manifest is not None and part in self.manifest.keys:
            return self.manifest.keys[part]
        if self.holds(index_name):
            return ListedKeys(self._read_weight_map(index_name))
        if self.holds(file_name):
            return ListedKeys(dict.fromkeys(self._header(file_name), file_name))
        if self.manifest is None and (numbered := self._numbered_files(part)):
            return ListedKeys({key: name for name in numbered for key in self._header(name)})
        raise LoadError(
            f"{self.folder} holds no part {part!r} (neither {index_name} nor {file_name}); "
            f"it holds {self.parts() or 'no part at all'}"
        )

    def _numbered_files(self, part: str) -> list[str]:
        """Return the files `PART-00001-of-00002.safetensors` of a directory without an index."""
        listed = sorted(self.opened.listed())
        found = [name for name in listed if _NUMBERED.search(name) and _part_of(name) == part]
        counts = {int(n.rpartition("-of-")[2].removesuffix(".safetensors")) for n in found}
        wanted = {f"{part}-{n + 1:05d}-of-{c:05d}.safetensors" for c in counts for n in range(c)}
        if wanted != set(found):
            raise CorruptCheckpointError(
                f"{self.folder} has no index of {part!r}, and of its files "
                f"{sorted(wanted - set(found))[:3]} are missing; it holds {found[:3]}"
            )
        return found

    def _read_weight_map(self, index_name: str) -> dict[str, str]:
        path = self.folder / index_name
        try:
            weight_map = json.loads(self.read_file(index_name))["weight_map"]
            if not isinstance(weight_map, dict):
                raise CheckpointValueError("weight_map is not an object")
            for name in set(weight_map.values()):
                check_inside(name, self.folder)
            return weight_map
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path}: malformed index: {error!r}") from error

    def tensors(self, part: str, keys: Iterable[str] | None = None) -> dict[str, StoredTensor]:
        """Return the stored tensors of a part; with `keys` only those of them that it holds.

        Only the headers of files that hold a wanted key are read.
        """
        stored = self.stored_keys(part)
        where: Mapping[str, str] = {}
        if keys is None:
            where = stored.all()
        else:
            where = {key: name for key in keys if (name := stored.find(key)) is not None}
        headers = {name: self._header(name) for name in dict.fromkeys(where.values())}
        found = {}
        for key, name in where.items():
            entry = headers[name].get(key)
            if entry is None:
                raise CorruptCheckpointError(
                    f"{self.folder / name}: the index says that it holds {key!r}, but it does not"
                )
            _, dtype, shape, begin, end = entry
            found[key] = StoredTensor(dtype, shape, name, begin, end)
        return found

    def _header(self, name: str) -> dict[str, HeaderEntry]:
        if name not in self._headers:
            record = self.record(name)
            raw, entries = read_header(self.opened, name)
            if record is not None:
                check_bytes(raw, record, self.folder / name, whole=False)
            self._headers[name] = {entry.key: entry for entry in entries}
        return self._headers[name]


def _lies_apart(folder: OpenFolder) -> bool:
    """Whether the manifest of a directory names another folder for its files."""
    with suppress(LoadError):  # who reads the manifest says why it cannot be read
        return bool(Manifest.folder_of(folder))
    return False


def _part_of(name: str) -> str:
    """Return the part whose tensors or index a file holds, nothing for other files."""
    for suffix in (".safetensors.index.json", ".safetensors"):
        if name.endswith(suffix):
            return _NUMBERED.sub("", name).removesuffix(suffix)
    return ""


def check_inside(name: str, folder: object) -> str:
    """Return a file name of an index if it stays inside the directory."""
    try:
        return check_name(name)
    except ValueError as error:
        raise CorruptCheckpointError(f"{folder}: {error}") from error


def check_bytes(raw: bytes, record: FileRecord, path: object, *, whole: bool = True) -> None:
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


def read_checkpoint(checkpoint_id: Path | str | Location, read: Callable[[Checkpoint], _T]) -> _T:
    """Call `read` with the opened checkpoint, once more if it is replaced meanwhile.

    Raises:
        ReplacedCheckpointError: that happened again and again, or it was removed meanwhile.
        LoadError: as `Checkpoint` and `read`.
    """
    replaced: ReplacedCheckpointError | None = None
    for _ in range(MOST_ATTEMPTS - 1):
        try:
            with Checkpoint(checkpoint_id) as checkpoint:
                return read(checkpoint)
        except ReplacedCheckpointError as error:
            replaced = error
        except LoadError as error:
            if replaced is None or exists(as_target("checkpoint_id", checkpoint_id)):
                raise
            raise replaced from error  # it was removed, which says more than that it is not there
    with Checkpoint(checkpoint_id) as checkpoint:
        return read(checkpoint)


def exists(folder: Path | Location) -> bool:
    """Whether there is a directory, or a checkpoint in a store."""
    return is_stored(folder) if isinstance(folder, Location) else folder.exists()


def _open(folder: Path) -> OpenFolder:
    """Open a directory; wait while a save has it under another name (see `saving.commit`)."""
    for _ in range(_ASIDE_POLLS):
        try:
            return OpenFolder(folder)
        except (CorruptCheckpointError, StoreError):
            raise
        except LoadError:
            if not any(folder.parent.glob(f".{escape(folder.name)}.unified-ckpt-old-*")):
                break  # the save may have ended between the two looks: the next one tells
            time.sleep(_ASIDE_POLL_S)
    return OpenFolder(folder)


def read_index(
    checkpoint_id: Path | str | Location, part: str = "model"
) -> dict[str, StoredTensor]:
    """Return every stored tensor of a part: dtype, shape, file and byte range, by key.

    Raises:
        LoadError: no such directory or part.
        CorruptCheckpointError: an index or a header is damaged.
    """
    return read_checkpoint(checkpoint_id, lambda checkpoint: checkpoint.tensors(part))


def load_files(checkpoint_id: Path | str | Location, name: str) -> bytes:
    """Return the bytes of a file saved with `files` or `rank_files`, checked where possible.

    Raises:
        LoadError: no such directory or file.
        CorruptCheckpointError: the file is damaged.
    """
    return read_checkpoint(checkpoint_id, lambda checkpoint: checkpoint.read_file(name))

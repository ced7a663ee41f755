"""The manifest: every file of a checkpoint with its size and the CRC-32 of its pieces.

It is written last, before the directory gets its name, so a directory with a manifest is complete.
It is JSON and ends with the checksum of its bytes before that. A small one (version 3) holds the
records of all files; a large one (version 4) says where they lie in `manifest.bin` (see `tables/`),
which is a file of the checkpoint like others.

    manifest = read_manifest(OpenFolder(Path("checkpoint-10")))
    manifest.files["model.safetensors"].num_bytes
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from unified_ckpt.errors import MALFORMED, CheckpointValueError, CorruptCheckpointError
from unified_ckpt.files import ReadFolder, read_at, size_of
from unified_ckpt.files.checksums import crc32
from unified_ckpt.files.format.tables import (
    TABLES_NAME,
    FileRecord,
    StoredKeys,
    encode_tables,
    open_tables,
    unpack_record,
)

MANIFEST_NAME = "manifest.json"
INLINE_BYTES = 64 * 1024  # of packed records; a larger manifest is read in parts
_FORMAT = "unified-ckpt"
_VERSION = 3  # the same manifest as 2; `unified_ckpt.json` beside it says the types of values
_VERSION_IN_PARTS = 4
_READ_VERSIONS = (2, _VERSION, _VERSION_IN_PARTS)
_TAIL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n\Z')
_TAIL_BYTES = 4096  # of a manifest, more than the name of a folder takes there
_DATA_TAIL = re.compile(rb',"data":"([^"\\]+)","crc32":"[0-9a-f]{8}"}\n\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All files of a checkpoint but the manifest, by name relative to the directory.

    In a store they lie in a folder of it, `data`, that belongs to this manifest alone. One in parts
    has the sizes of files and the `keys` of parts, which are read as records are: when asked for.
    """

    files: Mapping[str, FileRecord]
    data: str = ""
    keys: Mapping[str, StoredKeys] = field(default_factory=dict)
    sizes_in_parts: Mapping[str, int] | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file."""
        if self.sizes_in_parts is not None:
            return self.sizes_in_parts
        return {name: record.num_bytes for name, record in self.files.items()}

    @staticmethod
    def folder_in(raw: bytes) -> str:
        """Return the folder that a manifest's bytes say its files are in, "" for its own.

        Checks nothing: who must know it to read the rest of a manifest in parts cannot decode that.
        """
        found = _DATA_TAIL.search(raw)
        return "" if found is None else found[1].decode(errors="replace")

    @staticmethod
    def folder_of(opened: ReadFolder) -> str:
        """As `folder_in`, of a directory of which the manifest's end is read; "" without one."""
        if opened.size(MANIFEST_NAME) is None:
            return ""
        with opened.open(MANIFEST_NAME) as file:
            num_bytes = size_of(file)
            end = bytearray(min(_TAIL_BYTES, num_bytes))
            read_at(file, [memoryview(end)], num_bytes - len(end))
        return Manifest.folder_in(bytes(end))


def encode_manifest(
    records: Mapping[str, bytes],
    keys: Callable[[], Mapping[str, Mapping[str, str]]],
    *,
    data: str = "",
) -> dict[str, bytes]:
    """Return the files that are a manifest, in the order in which they must be written.

    Args:
        records: packed record of each file, by name.
        keys: makes the file of each stored tensor, by part; only a manifest in parts needs it.
        data: see `Manifest`.
    """
    records = dict(sorted(records.items()))
    table: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
    blobs: dict[str, bytes] = {}
    if sum(map(len, records.values())) <= INLINE_BYTES:
        table["files"] = {name: unpack_record(raw).to_json() for name, raw in records.items()}
    else:
        blobs[TABLES_NAME], said = encode_tables(records, keys())
        table |= {"version": _VERSION_IN_PARTS, **said}
    if data:
        table["data"] = data
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    blobs[MANIFEST_NAME] = body + b',"crc32":"%08x"}\n' % crc32(body)
    return blobs


def decode_manifest(raw: bytes, folder: ReadFolder) -> Manifest:
    """Read a manifest's bytes, which are those of a folder's."""
    path = folder.path / MANIFEST_NAME
    tail = _TAIL.search(raw)
    if tail is None or int(tail[1], 16) != crc32(raw[: tail.start()]):
        raise CorruptCheckpointError(f"{path}: the manifest does not match its own checksum")
    try:
        table = json.loads(raw)
        if table["format"] != _FORMAT or table["version"] not in _READ_VERSIONS:
            raise CheckpointValueError(
                f"format {table['format']!r} version {table['version']!r} is not known here; "
                f"this package reads {_FORMAT!r} of versions {_READ_VERSIONS}"
            )
        data = check_name(table["data"]) if "data" in table else ""
        names = [check_name(name) for name in table["files"].keys()]  # noqa: SIM118 - no list
        if table["version"] == _VERSION_IN_PARTS:
            records, sizes, keys = open_tables(table, folder)
            return Manifest(files=records, data=data, keys=keys, sizes_in_parts=sizes)
        files = {name: FileRecord.from_json(table["files"][name]) for name in names}
    except MALFORMED as error:
        raise CorruptCheckpointError(f"{path}: malformed manifest: {error}") from error
    return Manifest(files=files, data=data)


def read_manifest(folder: ReadFolder) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None where there is none."""
    if folder.size(MANIFEST_NAME) is None:
        return None
    return decode_manifest(folder.read(MANIFEST_NAME), folder)


def check_sizes(folder: ReadFolder, manifest: Manifest) -> list[str]:
    """List the files that are missing or have another size than the manifest says."""
    problems = []
    for name, num_bytes in manifest.sizes.items():
        size = folder.size(name)
        if size is None:
            problems.append(f"{name}: file is missing")
        elif size != num_bytes:
            problems.append(f"{name}: {size} bytes, expected {num_bytes}")
    return problems


def check_name(name: str) -> str:
    """Return a file name that a table states if it is a relative path inside the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CheckpointValueError(f"file name {name!r} leads outside the checkpoint")
    if max(map(len, map(os.fsencode, path.parts)), default=256) > 255 or len(name) > 1024:
        raise CheckpointValueError(f"file name {name[:80]!r} is empty or too long")
    return name

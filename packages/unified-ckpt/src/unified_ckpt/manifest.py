"""The manifest: every file of a checkpoint with its size and the CRC-32 of its pieces.

It is written last, before the directory gets its name, so a directory with a manifest is complete.
A piece is a region of a file: one run of bytes, or the strided runs of a box that one of several
writers of the file held. The manifest ends with the checksum of its own bytes before that.

    manifest = read_manifest(Path("checkpoint-10"))
    manifest.files["model.safetensors"].num_bytes
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unified_ckpt.boxes import Region
from unified_ckpt.errors import CorruptCheckpointError

MANIFEST_NAME = "manifest.json"
_FORMAT = "unified-ckpt"
_VERSION = 1
_TAIL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n\Z')


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size and its pieces with their CRC-32, which together cover every byte."""

    num_bytes: int
    pieces: tuple[tuple[Region, int], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {"bytes": self.num_bytes, "pieces": [_pack(*piece) for piece in self.pieces]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileRecord":
        """Undo `to_json`."""
        return cls(value["bytes"], tuple(_unpack(piece) for piece in value["pieces"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All files of a checkpoint but the manifest, by name relative to the directory."""

    files: Mapping[str, FileRecord]


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as JSON text that ends with its own checksum."""
    files = {name: record.to_json() for name, record in sorted(manifest.files.items())}
    table = {"format": _FORMAT, "version": _VERSION, "files": files}
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def decode_manifest(raw: bytes, path: Path) -> Manifest:
    """Read a manifest's bytes; `path` names it in messages.

    Raises:
        CorruptCheckpointError: the bytes are damaged or of an unknown version.
    """
    tail = _TAIL.search(raw)
    if tail is None or int(tail[1], 16) != zlib.crc32(raw[: tail.start()]):
        raise CorruptCheckpointError(f"{path}: the manifest does not match its own checksum")
    try:
        table = json.loads(raw)
        if (table["format"], table["version"]) != (_FORMAT, _VERSION):
            raise ValueError(
                f"format {table['format']!r} version {table['version']!r} is not known here; "
                f"this package reads {_FORMAT!r} version {_VERSION}"
            )
        files = {name: FileRecord.from_json(entry) for name, entry in table["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: malformed manifest: {error}") from error
    return Manifest(files=files)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None where there is none.

    Raises:
        CorruptCheckpointError: there is one, but it is damaged.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode_manifest(raw, path)


def check_sizes(checkpoint: Path, manifest: Manifest) -> list[str]:
    """List the files that are missing or have another size than the manifest says."""
    problems = []
    for name, record in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            problems.append(f"{name}: file is missing")
        elif path.stat().st_size != record.num_bytes:
            problems.append(f"{name}: {path.stat().st_size} bytes, expected {record.num_bytes}")
    return problems


def _pack(region: Region, crc: int) -> list[object]:
    if region.contiguous:
        return [region.start, region.run_bytes, crc]
    return [region.start, region.run_bytes, region.counts, region.strides, crc]


def _unpack(piece: list[Any]) -> tuple[Region, int]:
    start, run_bytes, *middle, crc = piece
    counts, strides = (tuple(m) for m in middle) if middle else ((), ())
    numbers = (start, run_bytes, *counts, *strides, crc)
    if len(counts) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"piece {piece!r}")
    return Region(start, run_bytes, counts, strides), crc

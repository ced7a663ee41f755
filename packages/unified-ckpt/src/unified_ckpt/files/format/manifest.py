"""The manifest: every file of a checkpoint with its size and the CRC-32 of its pieces.

It is written last, before the directory gets its name, so a directory with a manifest is complete.
A piece is a region of a file: one run of bytes, or the strided runs of a box that one of several
writers of the file held. Pieces that follow each other are stored as columns (lengths, checksums),
since a file may have 20,000 of them. The manifest ends with the checksum of its bytes before that.

    manifest = read_manifest(OpenFolder(Path("checkpoint-10")))
    manifest.files["model.safetensors"].num_bytes
"""

import binascii
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import Any

from unified_ckpt.errors import CheckpointValueError, CorruptCheckpointError
from unified_ckpt.files import ReadFolder
from unified_ckpt.files.checksums import crc32
from unified_ckpt.geometry import Region

MANIFEST_NAME = "manifest.json"
_FORMAT = "unified-ckpt"
_VERSION = 3  # the same manifest as 2; `unified_ckpt.json` beside it says the types of values
_READ_VERSIONS = (2, _VERSION)
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
_TAIL = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n\Z')


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size and its pieces with their CRC-32, which together cover every byte.

    Attributes:
        num_bytes: size of the file.
        begins: where each contiguous piece begins, ascending.
        lengths: bytes of each contiguous piece.
        sums: CRC-32 of each contiguous piece.
        strided: the other pieces, each with its CRC-32.
    """

    num_bytes: int
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    sums: tuple[int, ...]
    strided: tuple[tuple[Region, int], ...] = ()

    @classmethod
    def of(cls, num_bytes: int, pieces: Iterable[tuple[Region, int]]) -> "FileRecord":
        """Make a record from (region, CRC-32) pairs in any order."""
        runs: list[tuple[int, int, int]] = []
        strided = []
        for region, crc in pieces:
            if region.counts:
                strided.append((region, crc))
            else:
                runs.append((region.start, region.run_bytes, crc))
        runs.sort()
        begins, lengths, sums = zip(*runs, strict=True) if runs else ((), (), ())
        return cls(num_bytes, begins, lengths, sums, tuple(strided))

    def pieces(self) -> Iterator[tuple[Region, int]]:
        """Yield every piece: its region and CRC-32."""
        for begin, length, crc in zip(self.begins, self.lengths, self.sums, strict=True):
            yield Region(begin, length), crc
        yield from self.strided

    @property
    def covered_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.lengths) + sum(region.num_bytes for region, _ in self.strided)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        ends = [b + n for b, n in zip(self.begins, self.lengths, strict=True)]
        breaks = [i for i in range(1, len(ends)) if ends[i - 1] != self.begins[i]]
        bounds = [0, *breaks, len(self.begins)] if self.begins else [0]
        runs = [
            [self.begins[i], list(self.lengths[i:j]), sums_to_text(self.sums[i:j])]
            for i, j in pairwise(bounds)
        ]
        strided = [[r.start, r.run_bytes, r.counts, r.strides, crc] for r, crc in self.strided]
        return {"bytes": self.num_bytes, "runs": runs, "strided": strided}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileRecord":
        """Undo `to_json`."""
        begins: list[int] = []
        lengths: list[int] = []
        sums: list[int] = []
        for start, run_lengths, text in value["runs"]:
            _check_numbers([start, *run_lengths])
            *run_begins, _ = accumulate(run_lengths, initial=start)
            run_sums = text_to_sums(text)
            if len(run_sums) != len(run_lengths):
                raise CheckpointValueError(f"{len(run_sums)} sums for {len(run_lengths)} pieces")
            begins += run_begins
            lengths += run_lengths
            sums += run_sums
        strided = tuple(_strided_piece(piece) for piece in value["strided"])
        _check_numbers([value["bytes"]])
        record = cls(value["bytes"], tuple(begins), tuple(lengths), tuple(sums), strided)
        record.check_bounds()
        return record

    def check_bounds(self) -> None:
        """Refuse what would make a reader work longer than the file is."""
        ends = [b + n for b, n in zip(self.begins, self.lengths, strict=True)]
        if any(end > begin for end, begin in zip(ends, self.begins[1:], strict=False)):
            raise CheckpointValueError("pieces overlap or are not in order")
        ends += [region.end for region, _ in self.strided]
        if ends and max(ends) > self.num_bytes:
            raise CheckpointValueError(f"a piece ends at byte {max(ends)} of {self.num_bytes}")
        if self.covered_bytes > self.num_bytes:
            raise CheckpointValueError(f"pieces of {self.covered_bytes} bytes for {self.num_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All files of a checkpoint but the manifest, by name relative to the directory.

    In a store they lie in a folder of it, `data`, that belongs to this manifest alone.
    """

    files: Mapping[str, FileRecord]
    data: str = ""


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as JSON text that ends with its own checksum."""
    files = {name: record.to_json() for name, record in sorted(manifest.files.items())}
    table: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "files": files}
    if manifest.data:
        table["data"] = manifest.data
    body = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    return body + b',"crc32":"%08x"}\n' % crc32(body)


def decode_manifest(raw: bytes, path: object) -> Manifest:
    """Read a manifest's bytes; `path` names it in messages."""
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
        files = {
            check_name(name): FileRecord.from_json(entry) for name, entry in table["files"].items()
        }
        data = check_name(table["data"]) if "data" in table else ""
    except _MALFORMED as error:
        raise CorruptCheckpointError(f"{path}: malformed manifest: {error}") from error
    return Manifest(files=files, data=data)


def read_manifest(folder: ReadFolder) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None where there is none."""
    if folder.size(MANIFEST_NAME) is None:
        return None
    return decode_manifest(folder.read(MANIFEST_NAME), folder.path / MANIFEST_NAME)


def check_sizes(folder: ReadFolder, manifest: Manifest) -> list[str]:
    """List the files that are missing or have another size than the manifest says."""
    problems = []
    for name, record in manifest.files.items():
        size = folder.size(name)
        if size is None:
            problems.append(f"{name}: file is missing")
        elif size != record.num_bytes:
            problems.append(f"{name}: {size} bytes, expected {record.num_bytes}")
    return problems


def check_name(name: str) -> str:
    """Return a file name that a table states if it is a relative path inside the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CheckpointValueError(f"file name {name!r} leads outside the checkpoint")
    if max(map(len, map(os.fsencode, path.parts)), default=256) > 255 or len(name) > 1024:
        raise CheckpointValueError(f"file name {name[:80]!r} is empty or too long")
    return name


def sums_to_text(sums: Sequence[int]) -> str:
    """Write 32-bit checksums as text of 8 hexadecimal digits each."""
    return struct.pack(f">{len(sums)}I", *sums).hex()


def text_to_sums(text: str) -> tuple[int, ...]:
    """Undo `sums_to_text`."""
    raw = binascii.unhexlify(text)
    if len(raw) % 4:
        raise CheckpointValueError(f"{len(raw)} bytes of checksums are not a multiple of 4")
    return struct.unpack(f">{len(raw) // 4}I", raw)


def _strided_piece(piece: Sequence[Any]) -> tuple[Region, int]:
    start, run_bytes, counts, strides, crc = piece
    _check_numbers([start, run_bytes, crc, *counts, *strides])
    if len(counts) != len(strides) or not counts or not (run_bytes and all(counts)):
        raise CheckpointValueError(f"strided piece {piece!r}")
    return Region(start, run_bytes, tuple(counts), tuple(strides)), crc


def _check_numbers(values: Sequence[Any]) -> None:
    if set(map(type, values)) - {int} or (values and min(values) < 0):
        raise CheckpointValueError("a size, place or checksum is not a natural number")

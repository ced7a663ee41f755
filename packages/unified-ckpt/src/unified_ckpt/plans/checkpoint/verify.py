"""Compare every byte of a checkpoint with its checksums, and name what is damaged.

verify_checkpoint("run/checkpoint-10").problems == ()
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unified_ckpt.errors import CorruptCheckpointError, LoadError, StoreError
from unified_ckpt.files import ReadFolder
from unified_ckpt.files.checksums import crc_of_file
from unified_ckpt.files.format import FileRecord, HeaderEntry, read_header
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry import Region
from unified_ckpt.plans.checkpoint.directory import Checkpoint, read_checkpoint

_INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged place: the file, the tensor there (None outside of tensors) and the fault.

    `begin` and `end` are the bytes of the file among which the damage lies; None where all of the
    file is meant.
    """

    file: str
    key: str | None
    message: str
    begin: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: " + (f"{self.key!r}: " if self.key else "") + self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify_checkpoint` found; without a manifest (`checksummed` False) structure only."""

    problems: tuple[Problem, ...]
    num_files: int
    num_bytes: int
    checksummed: bool


def verify_checkpoint(checkpoint_id: Path | str | Location) -> VerifyReport:
    """Read a checkpoint once and compare every byte with the manifest; not collective.

    A directory without manifest (from transformers) has only its headers and index checked.

    Raises:
        LoadError: there is no such directory, or it holds nothing that could be checked.
        StoreError: the store does not answer.
    """
    try:
        return read_checkpoint(checkpoint_id, verify_opened)
    except CorruptCheckpointError as error:  # of the directory or its manifest
        problem = Problem("manifest.json", None, str(error))
        return VerifyReport(problems=(problem,), num_files=0, num_bytes=0, checksummed=False)


def verify_opened(checkpoint: Checkpoint) -> VerifyReport:
    """As `verify_checkpoint`, of a checkpoint that is open."""
    if checkpoint.manifest is None:
        report = _verify_structure(checkpoint)
    else:
        report = _verify_bytes(checkpoint, checkpoint.manifest.files)
    if report.problems and not checkpoint.opened.leads_here():
        raise checkpoint.replaced()
    return report


def _verify_bytes(checkpoint: Checkpoint, files: Mapping[str, FileRecord]) -> VerifyReport:
    problems: list[Problem] = []
    num_bytes = 0
    for name in files:
        try:
            found, done = _verify_file(checkpoint.opened, name, files[name])
        except StoreError:  # says nothing about the file
            raise
        except LoadError as error:
            found, done = [Problem(name, None, str(error))], 0
        problems += found
        num_bytes += done
    return VerifyReport(
        problems=tuple(problems), num_files=len(files), num_bytes=num_bytes, checksummed=True
    )


def _verify_structure(checkpoint: Checkpoint) -> VerifyReport:
    listed = sorted(checkpoint.opened.listed())
    names = [name for name in listed if name.endswith(".safetensors")]
    if not names:
        raise LoadError(
            f"{checkpoint.folder} holds neither a manifest nor a safetensors file; "
            "name a checkpoint directory"
        )
    problems = []
    for name in names:
        try:
            read_header(checkpoint.opened, name)
        except CorruptCheckpointError as error:
            problems.append(Problem(name, None, str(error)))
    for name in listed:
        if name.endswith(_INDEX_SUFFIX):
            try:
                checkpoint.tensors(name.removesuffix(_INDEX_SUFFIX))
            except CorruptCheckpointError as error:
                problems.append(Problem(name, None, str(error)))
    return VerifyReport(
        problems=tuple(problems), num_files=len(names), num_bytes=0, checksummed=False
    )


def _verify_file(folder: ReadFolder, name: str, record: FileRecord) -> tuple[list[Problem], int]:
    size = folder.size(name)
    if size is None:
        return [Problem(name, None, "file is missing")], 0
    if size != record.num_bytes:
        return [Problem(name, None, f"has {size} bytes, expected {record.num_bytes}")], 0
    covered = record.covered_bytes
    problems = []
    if covered != record.num_bytes:
        message = f"the manifest has checksums for {covered} of {record.num_bytes} bytes"
        problems.append(Problem(name, None, message))
    with folder.open(name) as fd:
        damaged = [r for r, crc in record.pieces() if crc_of_file(fd, r) != crc]
    keys = _KeyLookup(folder, name, damaged)
    problems += [
        Problem(
            name,
            keys.key_at(region.start),
            f"bytes {region.start} to {region.end} differ from their checksum",
            region.start,
            region.end,
        )
        for region in damaged
    ]
    return problems, covered


class _KeyLookup:
    """Names the tensor at an offset of a file, as far as its header can be read."""

    def __init__(self, folder: ReadFolder, name: str, damaged: list[Region]) -> None:
        self._entries: tuple[HeaderEntry, ...] = ()
        if damaged and name.endswith(".safetensors"):
            try:
                self._entries = tuple(e for e in read_header(folder, name)[1] if e.end > e.begin)
            except CorruptCheckpointError:
                self._entries = ()  # the header itself is damaged and listed as such
        self._begins = [entry.begin for entry in self._entries]

    def key_at(self, offset: int) -> str | None:
        number = bisect_right(self._begins, offset) - 1
        return self._entries[number].key if number >= 0 else None

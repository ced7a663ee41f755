"""Checkpoints of torch DCP become checkpoints of this package, and the reverse.

One process without process groups reads and writes piece by piece: `from_dcp` holds one chunk that
a rank of the save wrote (and a copy of it while it is read), `to_dcp` at most 256 MiB of tensors.

    from_dcp("dcp/step-10", "run/checkpoint-10")
    to_dcp("run/checkpoint-10", "dcp/step-10")
"""

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from unified_ckpt.dcp.handing import Handed, HandingPlanner, hand_over, handed_box, handed_object
from unified_ckpt.dcp.pickles import METADATA_NAME, load_object, read_metadata
from unified_ckpt.dcp.reader import UnifiedStorageReader
from unified_ckpt.dcp.writer import UnifiedStorageWriter
from unified_ckpt.errors import CheckpointValueError, LoadError, as_path
from unified_ckpt.files.format import MANIFEST_NAME
from unified_ckpt.files.format.tables import TABLES_NAME
from unified_ckpt.geometry import split_box
from unified_ckpt.loading import DCP_NAME, Prefixes
from unified_ckpt.plans.checkpoint import Checkpoint, read_checkpoint
from unified_ckpt.saving import STATE_NAME
from unified_ckpt.saving.commit import Staging, clean_leftovers

MOST_BYTES = 256 * 1024 * 1024  # of tensors in memory, and in one file of DCP


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion wrote, and in `left` a line for each thing that it could not take along."""

    num_tensors: int
    num_objects: int
    num_bytes: int
    left: tuple[str, ...]


def from_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    prefixes: Mapping[str, str] | None = None,
    trusted: bool = False,
) -> Converted:
    """Write a checkpoint of what torch DCP has saved; what ranks held parts of comes out whole.

    Names become parts and keys as `UnifiedStorageWriter` has them. DCP's files have no checksums
    that torch compares, so damage of values there is not noticed.

    Args:
        source: the directory with DCP's `.metadata`.
        target: the directory to write; it must not exist, or be empty.
        prefixes: prefix of DCP's names -> part, beside the usual ones (see `Prefixes`).
        trusted: unpickle whatever the source holds, which may run any code of its writer.

    Raises:
        LoadError: the source is no DCP checkpoint, or is damaged.
        CheckpointTypeError: it holds a value or a dtype that cannot be stored, or a pickle that
            needs to be trusted.
        CheckpointValueError: the target is not empty; two names become one.
    """
    folder, place = as_path("source", source), _free("target", target)
    metadata = read_metadata(folder, trusted=trusted)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    def checked(name: str, raw: io.BytesIO) -> io.BytesIO:
        again = io.BytesIO()
        torch.save(load_object(name, raw, trusted=trusted), again)
        return again

    handed = [*_stored_chunks(metadata)]
    planner = HandingPlanner(
        reader, [[each] for each in handed], check_object=checked, where=folder
    )
    writer = UnifiedStorageWriter(
        place, prefixes=_part_of(prefixes), overwrite=False, one_at_a_time=True
    )
    paths = _paths(metadata)
    try:
        hand_over(planner, writer, [handed], paths)
    except BaseException:
        writer.set_up_storage_writer(is_coordinator=True)  # removes what it has written so far
        raise
    left = [*_attributes_left(metadata, paths), *_files_left(folder, metadata)]
    return _converted(metadata, handed, left)


def to_dcp(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    prefixes: Mapping[str, str] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Converted:
    """Write what torch DCP reads: every tensor in chunks, as if several ranks had saved it.

    What `from_dcp` or `UnifiedStorageWriter` has written gets DCP's names again; of other
    checkpoints, and transformers directories, a tensor is `PART.KEY`, and values have their paths.

    Args:
        source: the checkpoint; every byte of it is compared with its checksum.
        target: the directory to write; it must not exist, or be empty.
        prefixes: prefix of DCP's names -> part, in place of `PART.`; "" for names without one.
        most_bytes: of tensors in memory, and in one file.

    Raises:
        LoadError: the source cannot be read, is damaged, or has what torch cannot hold.
        CheckpointValueError: the target is not empty; two things get one name.
    """
    folder, place = as_path("source", source), _free("target", target)
    parts, left = read_checkpoint(folder, lambda opened: _look(opened, prefixes))
    reader = UnifiedStorageReader(folder, prefixes=parts, verify="touched")
    metadata = reader.read_metadata()
    if not metadata.state_dict_metadata:
        raise LoadError(f"{folder} holds neither tensors nor values; name a checkpoint")
    handed = [*_small_boxes(metadata, most_bytes)]
    batches = _in_batches(handed, most_bytes)
    planner = HandingPlanner(reader, batches, where=folder)
    clean_leftovers(place.parent)
    left += read_checkpoint(folder, lambda opened: [*_names_left(opened)])
    staging = Staging.make(place)
    try:
        hand_over(planner, _Writer(staging.folder, place), batches, metadata.planner_data)
        staging.publish()
    finally:
        staging.close()
    return _converted(metadata, handed, left)


class _Writer(FileSystemWriter):
    """torch's writer, in a hidden directory that becomes another."""

    def __init__(self, folder: Path, becomes: Path) -> None:
        super().__init__(folder, overwrite=False)
        self._becomes = becomes

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._becomes, save_id=self.save_id)


def _free(name: str, value: str | os.PathLike[str]) -> Path:
    """Return the path to write to; refuse one where something is."""
    place = Path(os.path.realpath(as_path(name, value)))
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointValueError(
            f"{place} exists and is not an empty directory; expected a new one, name another"
        )
    return place


def _part_of(prefixes: Mapping[str, str] | None) -> dict[str, str]:
    """Return the usual prefixes, those of the given parts replaced."""
    given = dict(prefixes or {})
    for prefix, part in given.items():
        if not part.isidentifier():
            raise CheckpointValueError(
                f"prefix {prefix!r}: {part!r} cannot name files; expected letters, digits and _"
            )
    usual = {p: part for p, part in Prefixes().part_of.items() if part not in given.values()}
    return usual | given


def _stored_chunks(metadata: Metadata) -> Iterator[Handed]:
    """Yield the objects, and the chunks that ranks wrote; empty ones only of empty tensors."""
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            yield handed_object(name)
        elif 0 in stored.size:
            yield _empty_tensor(name, stored)
        else:
            for chunk in stored.chunks:
                if 0 not in chunk.sizes:
                    offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
                    yield handed_box(name, stored, offset, shape, chunked=True)


def _small_boxes(metadata: Metadata, most_bytes: int) -> Iterator[Handed]:
    """Yield the objects, and boxes of all tensors that are small enough."""
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            yield handed_object(name)
        elif 0 in stored.size:
            yield _empty_tensor(name, stored)
        else:
            itemsize = stored.properties.dtype.itemsize
            for offset, shape in split_box(tuple(stored.size), itemsize, most_bytes):
                yield handed_box(name, stored, offset, shape, chunked=False)


def _empty_tensor(name: str, stored: TensorStorageMetadata) -> Handed:
    return handed_box(name, stored, (0,) * len(stored.size), tuple(stored.size), chunked=False)


def _in_batches(handed: list[Handed], most_bytes: int) -> list[list[Handed]]:
    batches: list[list[Handed]] = [[]]
    num_bytes = 0
    for each in handed:
        if batches[-1] and num_bytes + each.num_bytes > most_bytes:
            batches.append([])
            num_bytes = 0
        batches[-1].append(each)
        num_bytes += each.num_bytes
    return batches


def _paths(metadata: Metadata) -> dict[str, Any] | None:
    """Return where each name stood in the nested state, None if a planner kept something else."""
    data = metadata.planner_data
    if isinstance(data, Mapping) and all(
        type(name) is str
        and isinstance(path, tuple | list)
        and all(type(step) in (str, int) for step in path)
        for name, path in data.items()
    ):
        return dict(data)
    return None


def _attributes_left(metadata: Metadata, paths: Mapping[str, Any] | None) -> Iterator[str]:
    if metadata.planner_data and paths is None:
        kind = type(metadata.planner_data).__name__
        yield f"planner_data, a {kind} that no names and paths stand in"
    for name in sorted(metadata.__dict__.keys() - {field.name for field in fields(Metadata)}):
        if metadata.__dict__[name]:
            yield f"{name} of the metadata"


def _files_left(folder: Path, metadata: Metadata) -> Iterator[str]:
    """Yield what no tensor and no object of the metadata lies in."""
    used = {folder / info.relative_path for info in metadata.storage_data.values()}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in used and path != folder / METADATA_NAME:
            yield f"file {path.relative_to(folder)}"


def _look(
    checkpoint: Checkpoint, prefixes: Mapping[str, str] | None
) -> tuple[dict[str, str], list[str]]:
    """Return the prefix of each part, and what a DCP checkpoint has no place for."""
    parts, given = checkpoint.parts(), dict(prefixes or {})
    if given and checkpoint.holds(DCP_NAME):
        raise CheckpointValueError(
            f"{checkpoint.folder} has DCP's names in {DCP_NAME}, so no prefix can be given to them"
        )
    if strange := sorted(set(given.values()) - set(parts)):
        raise CheckpointValueError(f"{checkpoint.folder} has no part {strange[0]!r}, but {parts}")
    known = {MANIFEST_NAME, TABLES_NAME, STATE_NAME, DCP_NAME}
    for part in parts:
        known |= {f"{part}.safetensors", f"{part}.safetensors.index.json"}
        known |= set(checkpoint.stored_keys(part).all().values())
    left = [f"file {name}" for name in sorted(checkpoint.names() - known)]
    part_of = {f"{part}.": part for part in parts if part not in given.values()} | given
    if lost := sorted(set(parts) - set(part_of.values())):
        raise CheckpointValueError(f"no prefix is left for part {lost[0]!r}; give it one as well")
    return part_of, left


def _names_left(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names that `load` knows beside those of stored tensors."""
    if checkpoint.holds(STATE_NAME):
        content = json.loads(checkpoint.read_file(STATE_NAME))  # `read_metadata` has checked it
        for alias, key in content.get("tied", {}).items():
            yield f"name {alias!r}, which is tied to {key!r}"
        if content.get("skip_save_model_weight"):
            yield "weights of the model that only master_weights has (skip_save_model_weight)"


def _converted(metadata: Metadata, handed: list[Handed], left: list[str]) -> Converted:
    kinds = [*metadata.state_dict_metadata.values()]
    objects = sum(isinstance(kind, BytesStorageMetadata) for kind in kinds)
    return Converted(
        num_tensors=len(kinds) - objects,
        num_objects=objects,
        num_bytes=sum(each.num_bytes for each in handed),
        left=tuple(left),
    )

"""The weight files of every kind, from the same tensors: safetensors, torch's, Paddle's, DCP.

    files = deal_to_kind("bin", tensors, work, frame)
    files.targets, files.index, files.written

Tensors are dealt to files by one rule, whatever the kind; `files/` reads each kind back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_convert._kinds import INDEX_NAMES, SINGLE_NAMES, FileKind
from weight_convert.outputs.computed import Computations
from weight_convert.outputs.files import deal_to_files, index_of, shards_of
from weight_convert.outputs.target_file import Extent, Sum, TargetFile
from weight_convert.outputs.tensors import PlannedTensor
from weight_convert.outputs.weave import Weave
from weight_convert.outputs.zips import Part, torch_zip
from weight_convert.pickles import (
    METADATA_NAME,
    StoredItem,
    dcp_pickle,
    one_torch_pickle,
    paddle_parts,
    torch_pickle,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """What the tensors become: files, safetensors' index, and other files with their content."""

    targets: tuple[TargetFile, ...]
    index: bytes | None
    written: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What all files of an output share.

    Attributes:
        max_shard_bytes: limit on the tensor bytes of one file.
        metadata: of each safetensors file.
        index_metadata: what the index states beside the sizes.
        num_buffer_elements: elements that are no parameters.
        single_name: the one file that all tensors stand in, whatever the limit; "" for none.
    """

    max_shard_bytes: int
    metadata: Mapping[str, str]
    index_metadata: Mapping[str, Any]
    num_buffer_elements: int = 0
    single_name: str = ""


def deal_to_kind(
    kind: FileKind, tensors: Sequence[PlannedTensor], work: Computations, frame: Frame
) -> WeightFiles:
    """The weight files of a kind that hold `tensors`, which stand in their order.

    Raises:
        WeightConvertError: a dtype that the kind cannot hold.
    """
    if kind == "safetensors":
        targets, index = deal_to_files(
            tensors,
            max_shard_bytes=frame.max_shard_bytes,
            metadata=frame.metadata,
            index_metadata=frame.index_metadata,
            num_buffer_elements=frame.num_buffer_elements,
            single_name=frame.single_name,
        )
        return WeightFiles(targets=targets, index=index)
    shards = shards_of(tensors, frame.max_shard_bytes)
    if kind == "dcp":
        return _distributed(shards, work)
    targets = tuple(
        _file_of(kind, shard, number, len(shards), work)
        for number, shard in enumerate(shards, start=1)
    )
    content = index_of(targets, tensors, frame.index_metadata, frame.num_buffer_elements)
    written = ((INDEX_NAMES[kind], content),) if content is not None else ()
    return WeightFiles(targets=targets, index=None, written=written)


def _file_of(
    kind: FileKind, tensors: Sequence[PlannedTensor], number: int, total: int, work: Computations
) -> TargetFile:
    name = SINGLE_NAMES[kind]
    stem, _, ending = name.rpartition(".")
    name = name if total == 1 else f"{stem}-{number:05d}-of-{total:05d}.{ending}"
    described = [(tensor.key, tensor.dtype, tensor.shape) for tensor in tensors]
    if kind == "bin":
        parts, sums = torch_zip(name.removesuffix(".bin"), torch_pickle(described), tensors)
        return _assembled(name, parts, sums, tensors, work)
    known = paddle_parts(described)
    parts = [part for pair in zip(known, tensors, strict=False) for part in pair]
    return _assembled(name, [*parts, known[-1]], [], tensors, work)


def _distributed(shards: Sequence[Sequence[PlannedTensor]], work: Computations) -> WeightFiles:
    targets: list[TargetFile] = []
    items: list[StoredItem] = []
    for number, shard in enumerate(shards):
        name, at = f"__0_{number}.distcp", 0
        parts: list[Part] = []
        sums: list[Sum] = []
        for tensor in shard:
            described = tensor.key, tensor.dtype, tensor.shape
            zipped, of_zip = torch_zip("archive", one_torch_pickle(described), [tensor], at)
            size = sum(map(_size_of, zipped))
            items.append(
                StoredItem(
                    key=tensor.key,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    file=name,
                    offset_bytes=at,
                    size_bytes=size,
                )
            )
            parts, sums, at = parts + zipped, sums + of_zip, at + size
        targets.append(_assembled(name, parts, sums, shard, work))
    written = ((METADATA_NAME, dcp_pickle(items)),)
    return WeightFiles(targets=tuple(targets), index=None, written=written)


def _size_of(part: Part) -> int:
    return len(part) if isinstance(part, bytes) else part.size_bytes


def _assembled(
    name: str,
    parts: Sequence[Part],
    sums: Sequence[Sum],
    tensors: Sequence[PlannedTensor],
    work: Computations,
) -> TargetFile:
    """The file of these parts, one after another; neighbouring bytes are written as one."""
    joined: list[Part] = [b""]
    for part in parts:
        last = joined[-1]
        if isinstance(part, bytes) and isinstance(last, bytes):
            joined[-1] = last + part
        else:
            joined.append(part)
    header = joined.pop(0)
    end = _size_of(header)
    extents = []
    for part in joined:
        if isinstance(part, bytes):
            known = Weave(num_rows=0, runs=(), begins_with=part)
            part = work.add(known, (), key=name, dtype="U8", shape=(len(part),))
        for piece in part.pieces:
            extents.append(
                Extent(
                    file=piece.file,
                    source_offset=piece.offset_bytes,
                    target_offset=end,
                    size_bytes=piece.size_bytes,
                )
            )
            end += piece.size_bytes
    return TargetFile(
        name=name,
        header=header if isinstance(header, bytes) else b"",
        extents=tuple(extent for extent in extents if extent.size_bytes),
        keys=tuple(tensor.key for tensor in tensors),
        size_bytes=end,
        sums=tuple(sums),
    )

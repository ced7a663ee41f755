"""The files of an output as data: tensors dealt to files, headers, extents, the index.

Tensors are dealt to files in natural key order by the rule of `huggingface_hub`
(`split_state_dict_into_shards_factory`): a file is closed when the next tensor would exceed the
limit, a tensor above the limit gets a file of its own. Inside a file they stand as the
safetensors library puts them.

    targets, index = deal_to_files(tensors, max_shard_bytes=5_000_000_000, ...)

Invariant: in each target file the header and the extents tile the file in rising order without
hole or overlap.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from weight_convert._checks import Record
from weight_convert.files import INDEX_NAME, SINGLE_NAME, encode_header, layout_order
from weight_convert.outputs.computed import Computed
from weight_convert.outputs.target_file import Extent, TargetFile
from weight_convert.outputs.tensors import PlannedTensor

_COUNTS = ("total_parameters", "total_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan(Record):
    """All that is written into a directory.

    Attributes:
        sources: paths of the weight files to read, in the source directory where they are
            relative; `Extent.file` indexes them, and behind them `computed`.
        computed: tensors that are computed.
        targets: the weight files to write.
        index: content of the index file, or None for a single file.
        carried: (name, bytes) of the files to copy unchanged from the source directory.
        written: (name, content) of other files, such as a `config.json` that changes.
        data_bytes: bytes of all tensors.
        num_computed: tensors of the output that hold computed bytes.
    """

    sources: tuple[str, ...]
    computed: tuple[Computed, ...] = ()
    targets: tuple[TargetFile, ...]
    index: bytes | None
    carried: tuple[tuple[str, int], ...]
    written: tuple[tuple[str, bytes], ...] = ()
    data_bytes: int
    num_computed: int = 0

    def output_files(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of every file that the output will hold."""
        weights = tuple((target.name, target.size_bytes) for target in self.targets)
        index = () if self.index is None else ((INDEX_NAME, len(self.index)),)
        written = tuple((name, len(content)) for name, content in self.written)
        return weights + index + self.carried + written


def deal_to_files(
    tensors: Sequence[PlannedTensor],
    *,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    index_metadata: Mapping[str, Any],
    num_buffer_elements: int = 0,
    single_name: str = "",
) -> tuple[tuple[TargetFile, ...], bytes | None]:
    """The weight files that hold `tensors`, which stand in their order, and their index.

    Args:
        tensors: sorted by `order`.
        max_shard_bytes: limit on the tensor bytes of one file.
        metadata: of each file.
        index_metadata: what the index states beside the sizes.
        num_buffer_elements: elements that are no parameters.
        single_name: the one file that all tensors stand in, whatever the limit; "" for none.
    """
    shards = [list(tensors)] if single_name else shards_of(tensors, max_shard_bytes)
    targets = tuple(
        lay_out(single_name or _file_name(number, len(shards)), shard, metadata)
        for number, shard in enumerate(shards, start=1)
    )
    return targets, index_of(targets, tensors, index_metadata, num_buffer_elements)


def shards_of(tensors: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Deal tensors to files in order, oversized ones alone (the rule named above)."""
    shards: list[list[PlannedTensor]] = []
    current: list[PlannedTensor] = []
    current_bytes = 0
    for block in _blocks(tensors, max_shard_bytes):
        size_bytes = sum(tensor.size_bytes for tensor in block)
        if size_bytes > max_shard_bytes:
            shards.append(block)
            continue
        if current_bytes + size_bytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current += block
        current_bytes += size_bytes
    return [*shards, current] if current else shards


def _blocks(
    tensors: Sequence[PlannedTensor], max_shard_bytes: int
) -> Iterator[list[PlannedTensor]]:
    """Yield what stays together: one tensor, or one projection of all experts of a layer.

    transformers keeps the latter in one file, because they share a storage in its memory; here that
    gives way to the limit.
    """
    for _, group in groupby(tensors, key=lambda tensor: tensor.order[:2]):
        block = list(group)
        if sum(tensor.size_bytes for tensor in block) <= max_shard_bytes:
            yield block
        else:
            yield from ([tensor] for tensor in block)


def _file_name(number: int, total: int) -> str:
    """Return the name of file `number` (from 1) of `total`."""
    return SINGLE_NAME if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def lay_out(name: str, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> TargetFile:
    """The file `name` of tensors; ranges that are neighbours on both sides become one extent."""
    placed = sorted(tensors, key=lambda tensor: layout_order(tensor.dtype, tensor.key))
    header = encode_header([(t.key, t.dtype, t.shape) for t in placed], metadata)
    extents: list[Extent] = []
    end = len(header)
    for piece in (piece for tensor in placed for piece in tensor.pieces if piece.size_bytes):
        begin, size_bytes = piece.offset_bytes, piece.size_bytes
        last = extents[-1] if extents else None
        if last and (last.file, last.source_offset + last.size_bytes) == (piece.file, begin):
            extents.pop()
            begin, size_bytes = last.source_offset, last.size_bytes + size_bytes
        extents.append(
            Extent(
                file=piece.file,
                source_offset=begin,
                target_offset=end + piece.size_bytes - size_bytes,
                size_bytes=size_bytes,
            )
        )
        end += piece.size_bytes
    keys = tuple(tensor.key for tensor in placed)
    return TargetFile(name=name, header=header, extents=tuple(extents), keys=keys, size_bytes=end)


def index_of(
    targets: Sequence[TargetFile],
    tensors: Sequence[PlannedTensor],
    metadata: Mapping[str, Any],
    num_buffer_elements: int,
) -> bytes | None:
    """Return the index, as transformers writes it; None where it would say nothing.

    Regrouping changes neither the number of elements nor of bytes; buffers are no parameters.
    Facts of the source's index that only an index can hold keep an index beside a single file.
    """
    if len(targets) == 1 and not metadata.keys() - set(_COUNTS):
        return None
    counts = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors)
        - num_buffer_elements,
        "total_size": sum(tensor.size_bytes for tensor in tensors),
    }
    stated = {key: value for key, value in metadata.items() if key != "total_size"}
    weight_map = {key: target.name for target in targets for key in target.keys}
    index = {"metadata": counts | stated, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

"""The whole conversion as data: which files, of which bytes, copied from where.

Every byte of every output file is decided here, from headers alone. That makes a dry run exact,
makes the executor a loop over copies, and lets a test check a conversion without converting.

Invariant: in each target file the header and the extents tile the file in rising order without
hole or overlap; over all files, the extents read every data byte of the source exactly once.

    plan = plan_conversion(read_catalog(src), get_spec("qwen3_moe"), to="fused")
    plan.targets[0].extents[0]  # Extent(file=0, source_offset=264, target_offset=312, ...)

Tensors are dealt to files in natural key order by the rule of `huggingface_hub`
(`split_state_dict_into_shards_factory`): a file is closed when the next tensor would exceed the
limit, a tensor above the limit gets a file of its own. Inside a file they stand as the
safetensors library puts them. So the output in transformers' format equals, byte for byte, the
files that transformers writes under the same limit (if that holds one projection of a layer).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from weight_convert._checks import Record, check_kind
from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import INDEX_NAME, SINGLE_NAME, Catalog, encode_header, layout_order
from weight_convert.plan.completeness import check_complete, unmapped_keys
from weight_convert.plan.detection import detect_format, spec_of
from weight_convert.plan.regroup import PlannedTensor, as_stored, by_modules, in_memory
from weight_convert.plan.target_file import Extent, TargetFile
from weight_convert.specs import FamilySpec, Matcher, Side

DEFAULT_MAX_SHARD_BYTES = 50_000_000_000  # the default of transformers 5
DEFAULT_CHUNK_BYTES = 64 << 20
_COUNTS = ("total_parameters", "total_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions(Record):
    """How a conversion reads and writes.

    Attributes:
        max_shard_bytes: limit on the tensor bytes of one file; a bigger tensor gets its own file.
        source_format: the format of the source; None finds it by the names of its tensors.
        unknown: what becomes of a tensor that the family's spec does not name: "carry" keeps its
            name and bytes, "refuse" is an error.
        chunk_bytes: the most that a run which goes on with a killed one writes again.
        resume: go on with what a killed run to the same target left, and keep what is written
            when this one fails.
        move: use the source up: what is written is freed there, and the source is removed at the
            end, so that little more than one copy is ever on disk. Interrupted, it must be resumed.
    """

    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    source_format: str | None = None
    unknown: Literal["carry", "refuse"] = "carry"
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    resume: bool = False
    move: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        for name in ("max_shard_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise WeightConvertError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.unknown not in ("carry", "refuse"):
            raise WeightConvertError(f"unknown={self.unknown!r}; expected 'carry' or 'refuse'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan(Record):
    """All that a conversion will do.

    Attributes:
        sources: names of the source's weight files; `Extent.file` indexes them.
        targets: the weight files to write.
        index: content of the index file, or None for a single file.
        carried: (name, bytes) of the files to copy unchanged.
        data_bytes: bytes of all tensors.
        source_format, target_format: names of formats of the family.
        is_experimental: whether no test shows by another project's code that it reads the format.
        num_regrouped: output tensors that are new by name: renamed, a fusion or a slice.
        unknown_keys: tensors that the family's spec does not name, carried as they are.
    """

    sources: tuple[str, ...]
    targets: tuple[TargetFile, ...]
    index: bytes | None
    carried: tuple[tuple[str, int], ...]
    data_bytes: int
    source_format: str
    target_format: str
    is_experimental: bool
    num_regrouped: int
    unknown_keys: tuple[str, ...]

    def output_files(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of every file that the output will hold."""
        weights = tuple((target.name, target.size_bytes) for target in self.targets)
        index = () if self.index is None else ((INDEX_NAME, len(self.index)),)
        return weights + index + self.carried


def plan_conversion(
    catalog: Catalog,
    spec: FamilySpec | None,
    *,
    to: str,
    options: ConversionOptions | None = None,
) -> ConversionPlan:
    """Plan the conversion of a catalog into the format `to`; reads and writes nothing.

    Args:
        catalog: the source.
        spec: the family of the model; None takes it from `config.json`.
        to: a format of the family: "transformers" is what `save_pretrained` writes, "fused" has
            one tensor per layer and projection.
        options: limits and choices; None for the defaults.

    Raises:
        WeightConvertError: an argument is not as described, `config.json` names another family,
            or a tensor is unknown where that is refused.
        IncompleteExpertsError: see `check_complete`.
    """
    check_kind(catalog, Catalog, "catalog must be a Catalog; read_catalog returns one")
    options = options if options is not None else ConversionOptions()
    check_arguments(spec, options)
    family = spec_of(catalog, spec)
    family.format(to)
    source = options.source_format or detect_format(catalog, family)
    memory = in_memory(catalog, family, source)
    check_complete(catalog, family, memory)
    unknown = _unknown_keys(family, source, memory, options)
    if family.format(to).order == "modules":
        memory = by_modules(memory, family)
    tensors = sorted(as_stored(memory, family, to), key=lambda tensor: tensor.order)
    shards = _deal(tensors, options.max_shard_bytes)
    targets = tuple(
        _lay_out(_file_name(number, len(shards)), shard, catalog.metadata)
        for number, shard in enumerate(shards, start=1)
    )
    return ConversionPlan(
        sources=catalog.files,
        targets=targets,
        index=_index(targets, tensors, catalog.index_metadata or {}, _buffers(family, memory)),
        carried=catalog.carried,
        data_bytes=sum(tensor.size_bytes for tensor in tensors),
        source_format=source,
        target_format=to,
        is_experimental=not family.format(to).proof,
        num_regrouped=sum(tensor.key not in catalog.tensors for tensor in tensors),
        unknown_keys=unknown,
    )


def check_arguments(spec: FamilySpec | None, options: ConversionOptions) -> None:
    """Raise WeightConvertError unless they are as `plan_conversion` describes them."""
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec; get_spec returns one")
    check_kind(options, ConversionOptions, "options must be ConversionOptions")


def _unknown_keys(
    spec: FamilySpec,
    source: str,
    memory: Sequence[PlannedTensor],
    options: ConversionOptions,
) -> tuple[str, ...]:
    """The tensors in memory that the spec does not name; raise where they cannot be carried."""
    unmapped = unmapped_keys(memory, spec, source)
    if unmapped:
        raise IncompleteExpertsError(
            f"{len(unmapped)} tensors of single experts are not named by the spec of "
            f"{spec.model_type}, for example {unmapped[0]}; carried as they are they would not "
            f"match the converted experts. Name them in a spec of your own (--spec)"
        )
    if not spec.tensors:
        return ()
    known = Matcher([Side(names=(name,), groups=()) for name in spec.tensors], spec.companions)
    keys = tuple(tensor.key for tensor in memory if known.find(tensor.key) is None)
    if keys and options.unknown == "refuse":
        raise WeightConvertError(
            f"{len(keys)} tensors are not named by the spec of {spec.model_type}, for example "
            f"{keys[0]}; carry them (unknown='carry') or name them in a spec of your own"
        )
    return keys


def _buffers(spec: FamilySpec, memory: Sequence[PlannedTensor]) -> int:
    """Elements of tensors that are no parameters."""
    names = [name for name, note in spec.tensors.items() if note.role == "buffer"]
    matcher = Matcher([Side(names=(name,), groups=()) for name in names])
    return sum(math.prod(t.shape) for t in memory if matcher.find(t.key) is not None)


def _deal(tensors: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
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


def _lay_out(
    name: str, tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]
) -> TargetFile:
    """Place tensors in one file; ranges that are neighbours on both sides become one extent."""
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


def _index(
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

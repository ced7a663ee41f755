"""The whole conversion as data: which files, of which bytes, copied from where.

Every byte of every output file is decided here, from headers alone. That makes a dry run exact,
makes the executor a loop over copies, and lets a test check a conversion without converting.

Invariant: in each target file the header and the extents tile the file in rising order without
hole or overlap; over all files, the extents read every data byte of the source exactly once.

    plan = plan_conversion(read_catalog(src), get_spec("qwen3_moe"), to="fused")
    plan.targets[0].extents[0]  # Extent(file=0, source_offset=264, target_offset=312, ...)

Tensors are dealt to files as `outputs/files.py` says. So the output in transformers' format equals,
byte for byte, the files that transformers writes under the same limit (if that holds one projection
of a layer).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weight_convert._checks import Record, check_kind, check_sizes
from weight_convert._dtypes import FLOATS, stored_dtype
from weight_convert._kinds import FILES, FileKind
from weight_convert.errors import IncompleteExpertsError, WeightConvertError
from weight_convert.files import Catalog
from weight_convert.outputs import (
    Computations,
    FilePlan,
    Frame,
    PlannedTensor,
    deal_to_kind,
    with_config,
)
from weight_convert.plan.completeness import check_complete, unmapped_keys
from weight_convert.plan.detection import detect_format, spec_of
from weight_convert.plan.regroup import as_stored, by_modules, in_memory
from weight_convert.plan.standard_config import standard_config
from weight_convert.specs import FamilySpec, Matcher, Side

DEFAULT_MAX_SHARD_BYTES = 50_000_000_000  # the default of transformers 5
DEFAULT_CHUNK_BYTES = 64 << 20
_Tensors = Sequence[PlannedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions(Record):
    """How a conversion reads and writes.

    Attributes:
        max_shard_bytes: limit on the tensor bytes of one file; a bigger tensor gets its own file.
        source_format: the format of the source; None finds it by the names of its tensors.
        unknown: what becomes of a tensor that the family's spec does not name: "carry" keeps its
            name and bytes, "refuse" is an error.
        chunk_bytes: the most that a run which goes on with a killed one writes again, if that was
            not at a computed tensor, which is made again whole.
        resume: go on with what a killed run to the same target left, and keep what is written
            when this one fails.
        move: use the source up: what is written is freed there, and the source is removed at the
            end, so that little more than one copy is ever on disk. Interrupted, it must be resumed.
        dtype: "bfloat16", "float16" or "float32" for all parameters of these and of float64, and
            for `config.json`; buffers, what the spec's `keep_dtype` names and other dtypes stay,
            but fp8 is refused, as its scales would be rounded. None changes nothing. Needs torch.
        max_memory_bytes: limit on the resident memory of this process, imports included: what is
            computed is cut into smaller chunks; None for what is fastest.
        files: the kind of weight files: "safetensors", torch's "bin", Paddle's "pdparams", or "dcp"
            for a distributed checkpoint of torch; None for that of the format.
    """

    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
    source_format: str | None = None
    unknown: Literal["carry", "refuse"] = "carry"
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    resume: bool = False
    move: bool = False
    dtype: str | None = None
    files: FileKind | None = None
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        check_sizes(self, "max_shard_bytes", "chunk_bytes", "max_memory_bytes")
        if self.unknown not in ("carry", "refuse"):
            raise WeightConvertError(f"unknown={self.unknown!r}; expected 'carry' or 'refuse'")
        if self.files is not None and self.files not in FILES:
            raise WeightConvertError(f"files={self.files!r}; expected one of {', '.join(FILES)}")
        if self.dtype is not None:
            stored_dtype(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan(FilePlan):
    """All that a conversion will do.

    Attributes:
        source_format, target_format: names of formats of the family.
        is_experimental: whether no test shows by another project's code that it reads the format.
        num_regrouped: output tensors that are new by name: renamed, a fusion or a slice.
        unknown_keys: tensors that the family's spec, or the target format, does not name; carried
            as they are.
        other_keys: tensors of other parts of the model, the same in every format.
    """

    source_format: str
    target_format: str
    is_experimental: bool
    num_regrouped: int
    unknown_keys: tuple[str, ...]
    other_keys: tuple[str, ...]


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
    form = family.format(to)
    _check_move(catalog, options)
    source = options.source_format or detect_format(catalog, family)
    work = Computations(num_sources=len(catalog.files))
    memory = in_memory(catalog, family, source, work)
    check_complete(catalog, family, memory)
    others, buffers = (_of_role(role, family, memory) for role in ("other", "buffer"))
    unknown = _unknown_keys(family, (source, to), memory, others, options)
    if form.order == "modules":
        memory = by_modules(memory, family)
    tensors = sorted(as_stored(memory, family, to, work, catalog.config), key=lambda t: t.order)
    changes = standard_config(catalog, family, memory) if _is_foreign(catalog, source) else {}
    if options.dtype is not None:
        tensors = _in_dtype(tensors, _kept_in_dtype(family, memory), options.dtype, work)
        changes["dtype"] = options.dtype
    frame = _frame(catalog, source, options, buffers, form.file_name)
    carried, written = with_config(catalog, changes)
    files = deal_to_kind(options.files or form.files, tensors, work, frame)
    return ConversionPlan(
        sources=catalog.files,
        computed=tuple(work.all),
        targets=files.targets,
        index=files.index,
        carried=carried,
        written=written + files.written,
        data_bytes=sum(tensor.size_bytes for tensor in tensors),
        num_computed=work.count(tensors),
        source_format=source,
        target_format=to,
        is_experimental=not form.proof,
        num_regrouped=sum(tensor.key not in catalog.tensors for tensor in tensors),
        unknown_keys=unknown,
        other_keys=tuple(tensor.key for tensor in others),
    )


def _is_foreign(catalog: Catalog, source: str) -> bool:
    """Whether another program than transformers may have written `config.json`."""
    return catalog.kind == "pdparams" or source not in ("fused", "transformers")


def _frame(
    catalog: Catalog, source: str, options: ConversionOptions, buffers: _Tensors, file_name: str
) -> Frame:
    return Frame(
        max_shard_bytes=options.max_shard_bytes,
        metadata=catalog.metadata or _metadata(catalog, source),
        index_metadata=catalog.index_metadata or {},
        num_buffer_elements=sum(math.prod(tensor.shape) for tensor in buffers),
        single_name=file_name,
    )


def _metadata(catalog: Catalog, source: str) -> dict[str, str]:
    """What transformers wants a safetensors file to say, where no such file was the source."""
    is_own = catalog.kind == "safetensors" and not _is_foreign(catalog, source)
    return {} if is_own else {"format": "pt"}


def check_arguments(spec: FamilySpec | None, options: ConversionOptions) -> None:
    """Raise WeightConvertError unless they are as `plan_conversion` describes them."""
    check_kind(spec, (FamilySpec, type(None)), "spec must be a FamilySpec; get_spec returns one")
    check_kind(options, ConversionOptions, "options must be ConversionOptions")


def _check_move(catalog: Catalog, options: ConversionOptions) -> None:
    """Raise where a source cannot be used up: tensors may share bytes there."""
    if options.move and catalog.kind != "safetensors":
        raise WeightConvertError(
            f"{catalog.directory} holds {catalog.kind} files, whose tensors may share bytes; "
            f"convert them without moving"
        )
    if options.move and options.files in ("bin", "dcp"):
        raise WeightConvertError(
            f"files of the kind {options.files} hold checksums that are put in at the end, so that "
            f"an interrupted move could not tell what is written; convert without moving"
        )


def _unknown_keys(
    spec: FamilySpec,
    formats: tuple[str, str],
    memory: Sequence[PlannedTensor],
    others: _Tensors,
    options: ConversionOptions,
) -> tuple[str, ...]:
    """The tensors in memory that the spec does not name, or the target has no name for.

    Raises where they cannot be carried, or the options refuse them. `formats` are source and
    target; `others` are parts that every format names alike.
    """
    source, to = formats
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
    form = spec.format(to)
    alike = {tensor.key for tensor in others}
    named = Matcher([rule.target for rule in form.rules], spec.companions)
    keys = tuple(
        tensor.key
        for tensor in memory
        if known.find(tensor.key) is None
        or (form.renames_all and named.find(tensor.key) is None and tensor.key not in alike)
    )
    if keys and options.unknown == "refuse":
        raise WeightConvertError(
            f"{len(keys)} tensors are not named by the spec of {spec.model_type}, or have no name "
            f"in the format {to}, for example {keys[0]}; carry them (unknown='carry') or name them "
            f"in a spec of your own"
        )
    return keys


def _in_dtype(
    tensors: _Tensors, kept: _Tensors, dtype: str, work: Computations
) -> list[PlannedTensor]:
    """The tensors with their parameters in `dtype`; what has it already is copied."""
    stored = stored_dtype(dtype)
    coded = next((t.key for t in tensors if t.dtype.startswith("F8_")), None)
    if coded is not None:
        raise WeightConvertError(
            f"dtype={dtype!r} was asked for, but {coded} holds fp8 codes, whose scales would be "
            f"rounded with it; dequantise the model first, or leave the dtype as it is"
        )
    untouched = {t.pieces for t in kept}  # formats rename them, and leave their bytes whole
    return [
        work.cast(t, stored)
        if t.dtype in FLOATS and t.dtype != stored and t.pieces not in untouched
        else t
        for t in tensors
    ]


def _of_role(role: str, spec: FamilySpec, memory: _Tensors) -> _Tensors:
    """The tensors in memory to which the spec gives a role."""
    return _of_names([n for n, note in spec.tensors.items() if note.role == role], memory)


def _kept_in_dtype(spec: FamilySpec, memory: _Tensors) -> _Tensors:
    return _of_names([name for name in spec.tensors if spec.keeps_dtype(name)], memory)


def _of_names(names: Sequence[str], memory: _Tensors) -> _Tensors:
    matcher = Matcher([Side(names=(name,), groups=()) for name in names])
    return tuple(tensor for tensor in memory if matcher.find(tensor.key) is not None)

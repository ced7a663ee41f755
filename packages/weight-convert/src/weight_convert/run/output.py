"""Write a directory that is not a conversion: what a job made of a catalog's tensors, and a report.

    output = Output(tensors=tensors, work=work, sources=catalog.files, config={"dtype": "bfloat16"})
    write_output(catalog, output, Path("dst"))

A job says which tensors the output has, and everything else is here: files, index, `config.json`,
the files that are carried, atomic writing, resuming.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weight_convert._checks import Record, check_kind, check_sizes, checked_path
from weight_convert.files import Catalog, LeftOut
from weight_convert.outputs import (
    Computations,
    FilePlan,
    Frame,
    PlannedTensor,
    TargetFile,
    deal_to_kind,
    with_config,
)
from weight_convert.plan import ConversionOptions
from weight_convert.run.execution import Progress
from weight_convert.run.job import begin, carry_out
from weight_convert.run.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(Record):
    """How a job writes.

    Attributes:
        max_shard_bytes: limit on the tensor bytes of one file; a bigger tensor gets its own file.
        resume: go on with what a killed run to the same target left, and keep what is written
            when this one fails.
        dry_run: read and report, but write nothing; the target may exist.
        max_memory_bytes: as of `ConversionOptions`.
    """

    max_shard_bytes: int = ConversionOptions().max_shard_bytes
    resume: bool = False
    dry_run: bool = False
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        Record.__post_init__(self)  # a dataclass with slots cannot use super()
        check_sizes(self, "max_shard_bytes", "max_memory_bytes")

    @property
    def of_job(self) -> ConversionOptions:
        """What the engine has to know of these."""
        return ConversionOptions(resume=self.resume, max_memory_bytes=self.max_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a job writes.

    Attributes:
        tensors: of the output, in any order; their `order` sorts them over the files.
        work: those of them that are computed.
        sources: weight files, as `FilePlan.sources`.
        config: entries of `config.json` that change; None removes one.
        aside: weight files that no index names.
        not_carried: files of the source that have no place in the output, and why.
        removed: tensors of the source that are left out on demand, with their bytes.
    """

    tensors: Sequence[PlannedTensor]
    work: Computations
    sources: tuple[str, ...]
    config: Mapping[str, Any]
    aside: tuple[TargetFile, ...] = ()
    not_carried: tuple[LeftOut, ...] = ()
    removed: Mapping[str, int] = field(default_factory=dict)


def write_output(
    catalog: Catalog,
    output: Output,
    dst: Path | str,
    *,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write the new directory `dst`, or with `dry_run` say what it would hold.

    Args:
        catalog: the directory whose other files are carried, and whose config changes.
        output: the tensors.
        dst: the output; must not exist.
        options: None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Raises:
        TargetExistsError: `dst` exists or is being written.
        WeightConvertError: not enough free space, or no torch where tensors are computed.
        OSError: reading or writing failed. Whatever is raised, `dst` does not exist afterwards.
    """
    target = checked_path(dst)
    options = options if options is not None else OutputOptions()
    check_kind(options, OutputOptions, "options must be OutputOptions")
    written = options.of_job
    if not options.dry_run:
        former = begin(catalog.directory, target, written)
        if isinstance(former, Report):
            return former
    plan = _plan(catalog, output, options)
    report = Report(
        dst=target,
        source_format="",
        to="",
        is_experimental=False,
        dry_run=options.dry_run,
        files=plan.output_files(),
        num_source_tensors=len(catalog.tensors),
        num_tensors=len(output.tensors),
        num_regrouped=sum(tensor.key not in catalog.tensors for tensor in output.tensors),
        data_bytes=plan.data_bytes,
        copied_bytes=sum(file.size_bytes for file in plan.targets),
        left_out=catalog.left_out + output.not_carried,
        unknown_keys=(),
        num_computed=plan.num_computed,
        removed_keys=tuple(output.removed),
        removed_bytes=sum(output.removed.values()),
    )
    return carry_out(plan, report, catalog.directory, written, on_progress)


def _metadata(catalog: Catalog) -> dict[str, str]:
    """What transformers wants a safetensors file to say, where no such file was the source."""
    return {} if catalog.kind == "safetensors" else {"format": "pt"}


def _plan(catalog: Catalog, output: Output, options: OutputOptions) -> FilePlan:
    stated = dict(catalog.index_metadata or {})
    stated.pop("total_parameters", None)
    frame = Frame(
        max_shard_bytes=options.max_shard_bytes,
        metadata=catalog.metadata or _metadata(catalog),
        index_metadata=stated,
    )
    ordered = sorted(output.tensors, key=lambda tensor: tensor.order)
    files = deal_to_kind("safetensors", ordered, output.work, frame)
    carried, written = with_config(catalog, output.config)
    gone = {item.name for item in output.not_carried}
    return FilePlan(
        sources=output.sources,
        computed=tuple(output.work.all),
        targets=files.targets + output.aside,
        index=files.index,
        carried=tuple(entry for entry in carried if entry[0] not in gone),
        written=written,
        data_bytes=sum(tensor.size_bytes for tensor in output.tensors),
        num_computed=output.work.count(output.tensors),
    )

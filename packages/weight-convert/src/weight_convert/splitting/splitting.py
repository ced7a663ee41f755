"""Cut a model into one directory for each rank of a layout.

    split("Qwen3-30B-A3B", "split", SplitLayout(tp=4, ep=2))

For programs that load whole files on each rank; those that read boxes, as a trainer's checkpoint
does, need no such copy. Tensors stand under their names in memory, with the same keys on each rank.

Invariant: `join` of the output gives the source's tensors in memory, byte for byte.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weight_convert._checks import check_kind, checked_path
from weight_convert.cutting import ModelCuts, SplitLayout
from weight_convert.files import INDEX_NAME, SINGLE_NAME, Catalog, read_catalog
from weight_convert.outputs import (
    Computations,
    FilePlan,
    Frame,
    PlannedTensor,
    TargetFile,
    deal_to_kind,
    lay_out,
)
from weight_convert.plan import (
    check_complete,
    copied_in_memory,
    detect_format,
    spec_of,
)
from weight_convert.run import OutputOptions, Progress, Report, begin, carry_out
from weight_convert.specs import FamilySpec
from weight_convert.splitting.boxes import cut_out
from weight_convert.splitting.record import RECORD_NAME, SplitRecord, rank_folder


def split(
    src: Path | str,
    dst: Path | str,
    layout: SplitLayout,
    *,
    spec: FamilySpec | None = None,
    options: OutputOptions | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Write a directory for each rank of a layout into the new directory `dst`.

    Args:
        src: a model directory in any format of its family.
        dst: the output; must not exist. Other files of `src` stand in it once.
        layout: the degrees; any numbers, shares may be uneven or empty.
        spec: the family; None takes it from `config.json`.
        options: how to write; None for the defaults.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        What was written; `num_computed` tensors were woven of short runs.

    Raises:
        IncompleteExpertsError: experts are missing or differ.
        WeightConvertError: a tensor cannot be cut: its shape is not the spec's, heads are not
            stated in `config.json`, or a cut lies inside a block of scales.
        OSError: reading or writing failed. Whatever is raised, `dst` does not exist afterwards.
    """
    check_kind(layout, SplitLayout, "layout must be a SplitLayout")
    source, target = checked_path(src), checked_path(dst)
    options = options if options is not None else OutputOptions()
    check_kind(options, OutputOptions, "options must be OutputOptions")
    how = options.of_job
    if not options.dry_run:
        former = begin(source, target, how)
        if isinstance(former, Report):
            return former
    catalog = read_catalog(source)
    family = spec_of(catalog, spec)
    source_format = detect_format(catalog, family)
    tensors = copied_in_memory(catalog, family, source_format)
    check_complete(catalog, family, tensors)
    model = ModelCuts.of(
        {tensor.key: tensor.shape for tensor in tensors}, family, catalog.config, layout
    )
    plan = _plan(catalog, tensors, model, options)
    report = _report(target, catalog, plan, model, source_format, options.dry_run)
    return carry_out(plan, report, source, how, on_progress)


def _report(
    target: Path,
    catalog: Catalog,
    plan: FilePlan,
    model: ModelCuts,
    source_format: str,
    dry_run: bool,
) -> Report:
    return Report(
        dst=target,
        source_format=source_format,
        to=f"{model.layout.world_size} ranks",
        is_experimental=False,
        dry_run=dry_run,
        files=plan.output_files(),
        num_source_tensors=len(catalog.tensors),
        num_tensors=sum(len(file.keys) for file in plan.targets),
        num_regrouped=0,
        data_bytes=plan.data_bytes,
        copied_bytes=sum(file.size_bytes for file in plan.targets),
        left_out=catalog.left_out,
        unknown_keys=model.unknown_keys,
        num_computed=plan.num_computed,
    )


def _plan(
    catalog: Catalog,
    tensors: Sequence[PlannedTensor],
    model: ModelCuts,
    options: OutputOptions,
) -> FilePlan:
    work = Computations(num_sources=len(catalog.files))
    targets: list[TargetFile] = []
    num_computed = 0
    record = SplitRecord(
        layout=model.layout,
        model_type=model.model_type,
        tensors={tensor.key: (tensor.dtype, tensor.shape) for tensor in tensors},
    )
    written = [(RECORD_NAME, record.content())]
    ordered = sorted(tensors, key=lambda tensor: tensor.order)
    for rank in range(model.layout.world_size):
        places = model.layout.places(rank)
        mine = [
            cut_out(tensor, model.cuts[tensor.key], places, work)
            for tensor in ordered
            if model.is_on(places["pp"], tensor.key)
        ]
        num_computed += work.count(mine)
        frame = Frame(
            max_shard_bytes=options.max_shard_bytes, metadata=catalog.metadata, index_metadata={}
        )
        made = deal_to_kind("safetensors", mine, work, frame)
        files, index = made.targets, made.index
        if not mine:  # more ranks than layers: a file without tensors, so that loaders find one
            files, index = (lay_out(SINGLE_NAME, (), catalog.metadata),), None
        folder = rank_folder(rank)
        targets += [replace(file, name=f"{folder}/{file.name}") for file in files]
        if index is not None:
            written.append((f"{folder}/{INDEX_NAME}", index))
    return FilePlan(
        sources=catalog.files,
        computed=tuple(work.all),
        targets=tuple(targets),
        index=None,
        carried=catalog.carried,
        written=tuple(written),
        data_bytes=sum(target.size_bytes - len(target.header) for target in targets),
        num_computed=num_computed,
    )

"""Convert a model directory from one format of its family into another, streaming, bit for bit.

The plan is data; this module only carries it out: it copies byte ranges into a temporary
directory, makes them durable and publishes the result by one rename. No tensor is ever in this
process's memory, unless its dtype changes.

    report = convert("Qwen3-30B-A3B", "fused", to="fused")
    report.files, report.total_bytes

Invariant: every byte of every source tensor is in the output once, and a conversion followed by its
inverse gives the same tensors; `dst` holds the complete output or does not exist.
"""

from pathlib import Path

from weight_convert._checks import checked_path
from weight_convert.files import Catalog, read_catalog
from weight_convert.plan import (
    ConversionOptions,
    ConversionPlan,
    check_arguments,
    plan_conversion,
)
from weight_convert.run.execution import Progress
from weight_convert.run.job import begin, carry_out
from weight_convert.run.report import Report
from weight_convert.specs import FamilySpec


def convert(
    src: Path | str,
    dst: Path | str,
    *,
    to: str,
    spec: FamilySpec | None = None,
    options: ConversionOptions | None = None,
    dry_run: bool = False,
    on_progress: Progress | None = None,
) -> Report:
    """Convert the model directory `src` into the new directory `dst`.

    Args:
        src: a directory with `model.safetensors`, or `model.safetensors.index.json` and its files.
        dst: the output; must not exist. Its parents are created.
        to: a format of the family: "transformers" is what `save_pretrained` writes, "fused" has
            one tensor per layer and projection.
        spec: the family, from `get_spec` or `read_spec`; None takes it from `config.json`.
        options: limits and choices; None for the defaults.
        dry_run: read the headers and report, but write nothing; `dst` may exist.
        on_progress: called with (bytes done, bytes in all) as copying goes on.

    Returns:
        What was written. Other files of `src` (config, tokenizer, ...) are copied; see `left_out`.

    Raises:
        TargetExistsError: `dst` exists or is being written.
        IncompleteExpertsError: experts are missing, doubled or differ in shape or dtype.
        CorruptFileError: a source file is damaged or changed meanwhile.
        UnknownFamilyError: no spec is given and `config.json` names no known family.
        WeightConvertError: no weights in `src`, not enough free space for the output, a spec of
            another family than `config.json`'s, or an argument that is not as described.
        OSError: reading or writing failed. Whatever is raised, `dst` does not exist afterwards.
    """
    source, target = checked_path(src), checked_path(dst)
    options = options if options is not None else ConversionOptions()
    check_arguments(spec, options)
    place = source if dry_run else begin(source, target, options)
    if isinstance(place, Report):
        return place
    catalog = read_catalog(place)
    plan = plan_conversion(catalog, spec, to=to, options=options)
    report = _report(target, catalog, plan, dry_run)
    return carry_out(plan, report, source, options, on_progress)


def _report(target: Path, catalog: Catalog, plan: ConversionPlan, dry_run: bool) -> Report:
    return Report(
        dst=target,
        source_format=plan.source_format,
        to=plan.target_format,
        is_experimental=plan.is_experimental,
        dry_run=dry_run,
        files=plan.output_files(),
        num_source_tensors=len(catalog.tensors),
        num_tensors=sum(len(file.keys) for file in plan.targets),
        num_regrouped=plan.num_regrouped,
        data_bytes=plan.data_bytes,
        copied_bytes=sum(file.size_bytes for file in plan.targets),
        left_out=catalog.left_out,
        unknown_keys=plan.unknown_keys,
        other_keys=plan.other_keys,
        num_computed=plan.num_computed,
    )

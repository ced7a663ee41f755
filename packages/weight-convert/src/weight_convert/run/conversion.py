"""Convert a model directory from one format of its family into another, streaming, bit for bit.

The plan is data; this module only carries it out: it copies byte ranges into a temporary
directory, makes them durable and publishes the result by one rename. No tensor is ever in this
process's memory, unless its dtype changes.

    report = convert("Qwen3-30B-A3B", "fused", to="fused")
    report.files, report.total_bytes

Invariant: every byte of every source tensor is in the output once, and a conversion followed by its
inverse gives the same tensors; `dst` holds the complete output or does not exist.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weight_convert._checks import Record, checked_path
from weight_convert.errors import WeightConvertError
from weight_convert.files import Catalog, LeftOut, read_catalog
from weight_convert.plan import (
    ConversionOptions,
    ConversionPlan,
    check_arguments,
    plan_conversion,
)
from weight_convert.run.execution import Progress, execute
from weight_convert.run.moving import check_movable, hide_source, place_of, remove_source
from weight_convert.specs import FamilySpec
from weight_convert.staging import (
    Journal,
    fsync_path,
    hidden_sibling,
    read_journal,
    refuse_existing,
    staged_directory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Record):
    """What a conversion did, or with `dry_run` will do; the sizes are exact in both cases.

    Attributes:
        dst: the output directory.
        source_format, to: the formats of the source and of the output.
        is_experimental: whether no test shows by another project's code that it reads `to`.
        dry_run: True when nothing was written.
        files: (name, bytes) of every file of the output.
        num_source_tensors: tensors of the source.
        num_tensors: tensors of the output.
        num_regrouped: those of them that are renamed, a fusion or a slice of source tensors; 0
            means that the source had this format already and only its files are new.
        data_bytes: bytes of all tensors of the output.
        copied_bytes: bytes of weight files that were written; less than all of them where the run
            went on with what another had written.
        left_out: files and folders of the source that are not in the output, with the reason.
        unknown_keys: tensors that the family's spec does not name, carried as they are.
    """

    dst: Path
    source_format: str
    to: str
    is_experimental: bool
    dry_run: bool
    files: tuple[tuple[str, int], ...]
    num_source_tensors: int
    num_tensors: int
    num_regrouped: int
    data_bytes: int
    copied_bytes: int
    left_out: tuple[LeftOut, ...]
    unknown_keys: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files of the output."""
        return sum(size_bytes for _, size_bytes in self.files)


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
    journal_path = hidden_sibling(target, "journal")
    former, _ = read_journal(journal_path)
    if not dry_run:
        if options.resume and former is not None and _is_published(former, source, target):
            return _end(former, source, target)
        refuse_existing(target)
        _refuse_lost_source(former, options)
    place = place_of(source, former if options.resume else None)
    catalog = read_catalog(place)
    plan = plan_conversion(catalog, spec, to=to, options=options)
    report = _report(target, catalog, plan, dry_run)
    return report if dry_run else _carry_out(plan, report, source, options, on_progress)


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
    )


def _carry_out(
    plan: ConversionPlan,
    report: Report,
    source: Path,
    options: ConversionOptions,
    on_progress: Progress | None,
) -> Report:
    """Write the output, publish it, and say what was written."""
    target, journal_path = report.dst, hidden_sibling(report.dst, "journal")
    goes_on = options.resume and journal_path.exists()
    place = place_of(source, read_journal(journal_path)[0] if goes_on else None)
    job = {
        "identity": _identity(plan, place, options),
        "source": str(source.absolute()),
        "report": asdict(report) | {"dst": str(target)},
        "move": options.move,
    }
    if options.move:
        check_movable(place, plan.sources)
    else:
        _check_space(target, report.total_bytes)
    keep = options.resume or options.move
    with (
        _said_how_to_go_on(keep),
        staged_directory(target, keep=keep, resume=goes_on) as folder,
        _journal(journal_path, job, keep, goes_on) as journal,
    ):
        if options.move:
            journal.flush()
            fsync_path(journal.path.parent)
            place = hide_source(source, place)
        copied = execute(plan, place, folder, journal, options=options, on_progress=on_progress)
    _end(job, source, target)
    return replace(report, copied_bytes=copied)


@contextmanager
def _said_how_to_go_on(keep: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not keep:
            raise
        raise WeightConvertError(
            f"{error}; what is written stays: end the cause, and go on with the same command and "
            f"--resume"
        ) from error


def _check_space(target: Path, needed_bytes: int) -> None:
    """Raise when the file system of `target` cannot hold the output."""
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    partial = hidden_sibling(target, "partial")
    if partial.is_dir():  # what an earlier run wrote is kept, or removed at first
        needed_bytes -= sum(path.stat().st_size for path in partial.iterdir() if path.is_file())
    if free_bytes < needed_bytes:
        raise WeightConvertError(
            f"{folder} has {free_bytes} bytes free, the output needs {needed_bytes}; "
            f"free some space or choose a target on another disk"
        )


@contextmanager
def _journal(path: Path, job: Mapping[str, Any], keep: bool, goes_on: bool) -> Iterator[Journal]:
    """The journal of this job; it goes with a failure unless the files stay."""
    try:
        with Journal.open(path, job, resume=goes_on) as journal:
            yield journal
    except BaseException:
        if not keep:
            path.unlink(missing_ok=True)
        raise


def _identity(plan: ConversionPlan, source: Path, options: ConversionOptions) -> str:
    """What tells this job from every other one: which bytes go where, and the state of the source.

    A source that is being moved has other times with every unit.
    """
    digest = hashlib.sha256(repr((plan.carried, plan.index, plan.written)).encode())
    digest.update(repr([(c.operation, c.inputs) for c in plan.computed]).encode())
    for name in plan.sources:
        state = (source / name).stat()
        time_ns = 0 if options.move else state.st_mtime_ns
        digest.update(f"{name} {state.st_size} {time_ns};".encode())
    for target in plan.targets:
        digest.update(f"{target.name} {target.size_bytes};".encode() + target.header)
        for extent in target.extents:
            digest.update(b"%d %d %d;" % (extent.file, extent.source_offset, extent.target_offset))
    return digest.hexdigest()


def _refuse_lost_source(former: Mapping[str, Any] | None, options: ConversionOptions) -> None:
    """Raise where beginning anew would remove the only copy of what was moved."""
    if former is not None and former["move"] and not (options.resume and options.move):
        raise WeightConvertError(
            f"a move of {former['source']} to this target was interrupted; what it wrote is the "
            f"only copy of those bytes. Go on with the same command, --move and --resume"
        )


def _is_published(job: Mapping[str, Any], source: Path, target: Path) -> bool:
    """Whether the job of a journal has been published, and was stopped before its last steps."""
    return job["source"] == str(source.absolute()) and all(
        (target / name).is_file() and (target / name).stat().st_size == size_bytes
        for name, size_bytes in job["report"]["files"]
    )


def _end(job: Mapping[str, Any], source: Path, target: Path) -> Report:
    """What remains when the output is published: the moved source and the journal."""
    fields = job["report"]
    left_out = tuple(LeftOut(**item) for item in fields["left_out"])
    if job["move"]:
        remove_source(
            hidden_sibling(source.absolute(), "moving"), source, [i.name for i in left_out]
        )
    hidden_sibling(target, "journal").unlink(missing_ok=True)
    return Report(
        **fields
        | {
            "dst": target,
            "files": tuple((name, size) for name, size in fields["files"]),
            "unknown_keys": tuple(fields["unknown_keys"]),
            "left_out": left_out,
            "copied_bytes": 0,
        }
    )

"""Convert a model directory from one format of its family into another, streaming, bit for bit.

The plan is data; this module only carries it out: it copies byte ranges into a temporary
directory, makes them durable and publishes the result by one rename. No tensor is ever in this
process's memory.

    report = convert("Qwen3-30B-A3B", "fused", to="fused")
    report.files, report.total_bytes

Invariant: every byte of every source tensor is in the output once, and a conversion followed by its
inverse gives the same tensors; `dst` holds the complete output or does not exist.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from weight_convert._checks import Record, checked_path
from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files import INDEX_NAME, LeftOut, read_catalog
from weight_convert.plan import (
    ConversionOptions,
    ConversionPlan,
    TargetFile,
    check_arguments,
    plan_conversion,
    spec_of,
)
from weight_convert.specs import FamilySpec
from weight_convert.staging import (
    OpenFiles,
    copy_bytes,
    fsync_path,
    refuse_existing,
    staged_directory,
)

Progress = Callable[[int, int], None]


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
        data_bytes: bytes of all tensors, the same before and after.
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
    if not dry_run:
        refuse_existing(target)
    catalog = read_catalog(source)
    plan = plan_conversion(catalog, spec, to=to, options=options)
    report = Report(
        dst=target,
        source_format=plan.source_format,
        to=to,
        is_experimental=not spec_of(catalog, spec).format(to).proof,
        dry_run=dry_run,
        files=plan.output_files(),
        num_source_tensors=len(catalog.tensors),
        num_tensors=sum(len(file.keys) for file in plan.targets),
        num_regrouped=plan.num_regrouped,
        data_bytes=plan.data_bytes,
        left_out=catalog.left_out,
        unknown_keys=plan.unknown_keys,
    )
    if not dry_run:
        _check_space(target, report.total_bytes)
        with staged_directory(target) as temporary:
            _execute(plan, source, temporary, on_progress)
    return report


def _check_space(target: Path, needed_bytes: int) -> None:
    """Raise when the file system of `target` cannot hold the output."""
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise WeightConvertError(
            f"{folder} has {free_bytes} bytes free, the output needs {needed_bytes}; "
            f"free some space or choose a target on another disk"
        )


def _execute(
    plan: ConversionPlan, source: Path, folder: Path, on_progress: Progress | None
) -> None:
    """Write every file of the plan into `folder`, durable when this returns.

    One thread fsyncs finished files while the next ones are copied.
    """
    total = sum(size_bytes for _, size_bytes in plan.output_files())
    done = 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if on_progress is not None:
            on_progress(done, total)

    flushed: list[Future[None]] = []
    with (
        OpenFiles([source / name for name in plan.sources]) as sources,
        ThreadPoolExecutor(max_workers=1) as flusher,
    ):
        for target in plan.targets:
            _write_weights(target, folder, sources, plan.sources, advance)
            flushed.append(flusher.submit(fsync_path, folder / target.name))
        for name, size_bytes in plan.carried:
            _copy_file(source / name, folder / name, size_bytes)
            flushed.append(flusher.submit(fsync_path, folder / name))
            advance(size_bytes)
        if plan.index is not None:
            (folder / INDEX_NAME).write_bytes(plan.index)
            flushed.append(flusher.submit(fsync_path, folder / INDEX_NAME))
            advance(len(plan.index))
    for future in flushed:
        future.result()


def _write_weights(
    target: TargetFile,
    folder: Path,
    sources: OpenFiles,
    names: tuple[str, ...],
    advance: Callable[[int], None],
) -> None:
    """Write one weight file: its header, then its extents in order."""
    with (folder / target.name).open("xb", buffering=0) as file:
        _write_all(file.fileno(), target.header)
        advance(len(target.header))
        for extent in target.extents:
            copy_bytes(
                sources.fd(extent.file),
                file.fileno(),
                offset=extent.source_offset,
                size_bytes=extent.size_bytes,
                name=names[extent.file],
            )
            advance(extent.size_bytes)


def _write_all(fd: int, content: bytes) -> None:
    """Write `content`, in as many system calls as it takes."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _copy_file(source: Path, target: Path, size_bytes: int) -> None:
    """Copy a whole file that had `size_bytes` when the conversion was planned."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb", buffering=0) as write:
        found = os.fstat(read.fileno()).st_size
        if found != size_bytes:
            raise CorruptFileError(
                f"{source} had {size_bytes} bytes and now has {found}; it was changed meanwhile"
            )
        copy_bytes(read.fileno(), write.fileno(), offset=0, size_bytes=size_bytes, name=str(source))

"""The life of a job: begun or resumed, carried out beside its target, published, tidied up.

    place = begin(source, target, options)
    carry_out(plan, report, source, options, on_progress)

Invariant: `target` holds the complete output or does not exist.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weight_convert.errors import WeightConvertError
from weight_convert.files import LeftOut
from weight_convert.outputs import FilePlan
from weight_convert.plan import ConversionOptions
from weight_convert.run.execution import Progress, execute
from weight_convert.run.memory import Memory
from weight_convert.run.moving import (
    check_movable,
    check_way,
    hide_source,
    place_of,
    remove_source,
)
from weight_convert.run.report import Report
from weight_convert.staging import (
    Journal,
    fsync_path,
    hidden_sibling,
    read_journal,
    refuse_existing,
    staged_directory,
)


def begin(source: Path, target: Path, options: ConversionOptions) -> Path | Report:
    """Where to read a source from, or the report of a run that had written the target.

    Raises:
        TargetExistsError: something stands at the target.
        WeightConvertError: a move was interrupted, and this is not its continuation.
    """
    former, _ = read_journal(hidden_sibling(target, "journal"))
    if options.resume and former is not None and _is_published(former, source, target):
        return _end(former, source, target)
    refuse_existing(target)
    _refuse_lost_source(former, options)
    return place_of(source, former if options.resume else None)


def carry_out(
    plan: FilePlan,
    report: Report,
    source: Path,
    options: ConversionOptions,
    on_progress: Progress | None,
) -> Report:
    """Write the output, publish it, and say what was written; of a dry run, what would be.

    Raises:
        TargetExistsError: the target exists or is being written.
        WeightConvertError: not enough free space, too low a limit on memory, or a source that
            cannot be moved.
        OSError: reading or writing failed.
    """
    memory = Memory.of(plan, options.max_memory_bytes)
    report = replace(report, peak_memory_bytes=memory.peak_bytes)
    if report.dry_run:
        return report
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
        check_way(source, target)
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
        copied = execute(
            plan, place, folder, journal, memory, options=options, on_progress=on_progress
        )
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


def _identity(plan: FilePlan, source: Path, options: ConversionOptions) -> str:
    """What tells this job from every other one: which bytes go where, and the state of the source.

    A source that is being moved has other times with every unit, and of units of another size a
    journal's numbers and checksums say nothing; elsewhere such are held against the source.
    """
    digest = hashlib.sha256(repr((plan.carried, plan.index, plan.written)).encode())
    digest.update(repr([(c.operation, c.inputs) for c in plan.computed]).encode())
    if options.move:
        digest.update(f"{options.chunk_bytes};".encode())
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
            "other_keys": tuple(fields["other_keys"]),
            "removed_keys": tuple(fields["removed_keys"]),
            "left_out": left_out,
            "copied_bytes": 0,
        }
    )

"""Carry out a plan inside a directory that is not published yet.

Units are copied one after the other, inside the kernel; computed tensors, each a unit, come from
`compute/` chunk by chunk, and only for them it and torch are imported. Another thread notes each
unit in the journal and makes finished files durable, so a run that was killed goes on with the unit
that it was at, after it has held what was noted against the source. What cannot be held against one
later is read back and noted with a checksum: computed tensors, and units whose source is freed once
they are durable and noted (`move`).

    execute(plan, source, folder, journal, options=ConversionOptions(), on_progress=None)
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from weight_convert.errors import CorruptFileError, WeightConvertError
from weight_convert.files import INDEX_NAME
from weight_convert.outputs import Computed, FilePlan, TargetFile, Unit, Weave
from weight_convert.plan import ConversionOptions
from weight_convert.run.memory import Memory
from weight_convert.run.sums import put_sums
from weight_convert.run.weaving import woven
from weight_convert.staging import (
    Journal,
    OpenFiles,
    Pipe,
    checksum,
    free_range,
    fsync_path,
    same_bytes,
    write_all,
)

Progress = Callable[[int, int], None]
_TensorChunks = Callable[[Computed, OpenFiles, int], Iterator[memoryview]]


@dataclass(slots=True, kw_only=True)
class _Work:
    """What the units of one run share.

    Attributes:
        copied_bytes: bytes of weight files that this run wrote itself.
    """

    sources: OpenFiles
    pipe: Pipe
    freed: OpenFiles | None
    plan: FilePlan
    memory: Memory
    tensor_chunks: _TensorChunks | None
    unit_bytes: int
    journal: Journal
    total_bytes: int
    on_progress: Progress | None
    checker: ThreadPoolExecutor
    pending: list[Future[None]] = field(default_factory=list)
    fds: set[int] = field(default_factory=set)  # of files that are being written
    done_bytes: int = 0
    copied_bytes: int = 0

    def advance(self, size_bytes: int) -> None:
        """Tell of bytes that are written."""
        self.done_bytes += size_bytes
        if self.on_progress is not None:
            self.on_progress(self.done_bytes, self.total_bytes)

    def after(self, job: Callable[[], None]) -> None:
        """Hand a job to the other thread, behind those that it has."""
        self.pending.append(self.checker.submit(job))

    def finish(self) -> None:
        """Wait for the other thread."""
        while self.pending:
            self.pending.pop(0).result()


def execute(
    plan: FilePlan,
    source: Path,
    folder: Path,
    journal: Journal,
    memory: Memory,
    *,
    options: ConversionOptions,
    on_progress: Progress | None,
) -> int:
    """Write every file of the plan into `folder`, durable when this returns.

    Args:
        plan: what to write.
        source: directory of the source's files.
        folder: where to write; what an earlier run noted in the journal stays.
        journal: of this job.
        memory: how much may be computed at once.
        options: of these, `chunk_bytes`, and `move`, which frees what was copied in the source.
        on_progress: called with (bytes done, bytes in all).

    Returns:
        Bytes of weight files that this run wrote itself.

    Raises:
        CorruptFileError: a source file is shorter than planned, or what an earlier run wrote has
            changed since and its source was freed.
    """
    paths = [source / name for name in plan.sources]
    with (
        OpenFiles(paths) as sources,
        Pipe() as pipe,
        OpenFiles(paths, flags=os.O_RDWR) as freed,
        ThreadPoolExecutor(max_workers=1) as checker,
    ):
        work = _Work(
            sources=sources,
            pipe=pipe,
            freed=freed if options.move else None,
            plan=plan,
            memory=memory,
            tensor_chunks=_tensor_chunks(plan),
            unit_bytes=max(options.chunk_bytes // 2, 1),  # one is copied while another is checked
            journal=journal,
            total_bytes=sum(size_bytes for _, size_bytes in plan.output_files()),
            on_progress=on_progress,
            checker=checker,
        )
        try:
            _write_files(plan, source, folder, work)
            work.finish()
        finally:
            checker.shutdown()
            for fd in work.fds:
                os.close(fd)
        return work.copied_bytes


def _write_files(plan: FilePlan, source: Path, folder: Path, work: _Work) -> None:
    number = 0
    for target in plan.targets:
        number = _write_weights(target, folder / target.name, number, work)
    for name, size_bytes in plan.carried:
        _copy_file(source / name, folder / name, size_bytes, work.pipe)
        work.after(_syncing(folder / name))
        work.advance(size_bytes)
    index = () if plan.index is None else ((INDEX_NAME, plan.index),)
    for name, content in plan.written + index:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        work.after(_syncing(folder / name))
        work.advance(len(content))


def _write_weights(target: TargetFile, path: Path, number: int, work: _Work) -> int:
    """Write one weight file, whose first unit has this number; return that of the next file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    work.fds.add(fd)
    for unit in target.units(work.unit_bytes, len(work.plan.sources)):
        if not _is_written(unit, number, fd, path, work):
            _write_unit(unit, number, fd, work)
        elif work.freed is not None:
            _free(unit, work)
        number += 1
    work.after(_ending(target, fd, work))
    return number


def _ending(target: TargetFile, fd: int, work: _Work) -> Callable[[], None]:
    def end() -> None:
        if os.fstat(fd).st_size > target.size_bytes:
            os.ftruncate(fd, target.size_bytes)
        put_sums(fd, target)
        os.fsync(fd)
        work.fds.remove(fd)
        os.close(fd)

    return end


def _write_unit(unit: Unit, number: int, fd: int, work: _Work) -> None:
    """Write a unit and see to its note; a kill costs one computed tensor, or two copied units."""
    is_copied = _is_copied(unit, work)
    if not is_copied:
        work.finish()
    os.lseek(fd, unit.begin, os.SEEK_SET)
    for size_bytes in _written_parts(unit, fd, work):
        work.advance(size_bytes)
    work.copied_bytes += unit.end - unit.begin
    work.finish()  # so the other thread is one unit behind at most
    work.after(_noting(unit, number, fd, work))
    if not is_copied:
        work.finish()


def _written_parts(unit: Unit, fd: int, work: _Work) -> Iterator[int]:
    """Write a unit at the file's position; yield the bytes of each part of it."""
    write_all(fd, unit.header)
    yield len(unit.header)
    num_sources = len(work.plan.sources)
    for extent in unit.extents:
        if extent.file < num_sources:
            work.pipe.copy(
                work.sources.fd(extent.file),
                fd,
                offset=extent.source_offset,
                size_bytes=extent.size_bytes,
                name=work.plan.sources[extent.file],
            )
            yield extent.size_bytes
        elif work.tensor_chunks is not None:
            computed = work.plan.computed[extent.file - num_sources]
            most = work.memory.elements(computed)
            for chunk in work.tensor_chunks(computed, work.sources, most):
                write_all(fd, chunk)
                yield len(chunk)


def _tensor_chunks(plan: FilePlan) -> _TensorChunks | None:
    """What computes tensors, where the plan has some: torch is imported only where it is needed."""
    if not plan.computed:
        return None
    chunks: _TensorChunks | None = None
    if not all(isinstance(computed.operation, Weave) for computed in plan.computed):
        try:
            chunks = import_module("weight_convert.compute").tensor_chunks
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise WeightConvertError(
                "computing tensors needs torch: pip install 'weight-convert[compute]'"
            ) from error

    def chunks_of(computed: Computed, files: OpenFiles, most: int) -> Iterator[memoryview]:
        if isinstance(computed.operation, Weave):
            return woven(computed.operation, computed, files)
        return iter(()) if chunks is None else chunks(computed, files, most)

    return chunks_of


def _is_written(unit: Unit, number: int, fd: int, path: Path, work: _Work) -> bool:
    """Whether an earlier run wrote this unit and it still stands there."""
    if number not in work.journal.noted:
        return False
    noted = work.journal.noted[number]
    if noted is None:
        is_same = _is_copied(unit, work) and _is_as_source(unit, fd, work)
    else:
        is_same = checksum(fd, unit.begin, unit.end) == noted
    if is_same:
        work.advance(unit.end - unit.begin)
        return True
    if work.freed is not None:
        raise CorruptFileError(
            f"bytes {unit.begin} to {unit.end} of {path} have changed since an earlier run moved "
            f"them there; their source was freed, so they must be restored from a copy"
        )
    return False


def _is_as_source(unit: Unit, fd: int, work: _Work) -> bool:
    """Whether a unit that is copied still stands there as its source has it."""
    return os.pread(fd, len(unit.header), unit.begin) == unit.header and all(
        same_bytes(
            (work.sources.fd(extent.file), fd),
            (extent.source_offset, extent.target_offset),
            extent.size_bytes,
        )
        for extent in unit.extents
    )


def _is_copied(unit: Unit, work: _Work) -> bool:
    return all(extent.file < len(work.plan.sources) for extent in unit.extents)


def _noting(unit: Unit, number: int, fd: int, work: _Work) -> Callable[[], None]:
    def note() -> None:
        if work.freed is None and _is_copied(unit, work):
            work.journal.note(number, None)
            return
        found = checksum(fd, unit.begin, unit.end)
        if found is None:
            raise CorruptFileError("an output file became shorter while it was written")
        if work.freed is not None:
            os.fsync(fd)
        work.journal.note(number, found)
        if work.freed is not None:
            work.journal.flush()
            _free(unit, work)

    return note


def _free(unit: Unit, work: _Work) -> None:
    """Free what a unit was copied from; freeing it again does nothing."""
    if work.freed is not None:
        copied = (e for e in unit.extents if e.file < len(work.plan.sources))
        for extent in copied:
            free_range(work.freed.fd(extent.file), extent.source_offset, extent.size_bytes)


def _syncing(path: Path) -> Callable[[], None]:
    return lambda: fsync_path(path)


def _copy_file(source: Path, target: Path, size_bytes: int, pipe: Pipe) -> None:
    """Copy a whole file that had `size_bytes` when the conversion was planned."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("wb", buffering=0) as write:
        found = os.fstat(read.fileno()).st_size
        if found != size_bytes:
            raise CorruptFileError(
                f"{source} had {size_bytes} bytes and now has {found}; it was changed meanwhile"
            )
        pipe.copy(read.fileno(), write.fileno(), offset=0, size_bytes=size_bytes, name=str(source))

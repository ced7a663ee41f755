"""Execute a load plan: read byte ranges into destinations, and check them with their checksums.

Checksums belong to pieces, contiguous ones of at most `CHUNK_BYTES`. A piece that is read whole is
checked as it comes. A piece that a read touches in part is checked only with `touched=True`, which
reads it once more, whole.

    with Reader(checkpoint, verify=True) as reader:
        reader.run(plan, destinations)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch

from unified_ckpt.devices import Sender
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.files import BATCH_BYTES, PositionedFile, read_at, read_runs
from unified_ckpt.files.checksums import Checksums, PendingSum, crc32, crc_of_file, crc_of_runs
from unified_ckpt.files.format import FileRecord
from unified_ckpt.geometry import Region
from unified_ckpt.geometry.tensors import bits_of, byte_view, is_plain_memory, narrow_box
from unified_ckpt.plans import LoadPlan, Read
from unified_ckpt.plans.checkpoint import Checkpoint

_PAGE_BYTES = 4096  # the disk reads whole pages, so smaller gaps cost only a copy
_TINY_RUN_BYTES = 512  # below it a call for each run costs more than reading over the gaps
_MANY_RUNS = 4096
_SPAN_BYTES = 4 * 1024 * 1024


class Destination(NamedTuple):
    """What one want reads into: the tensor, and the dtype in which its values are stored."""

    key: str
    tensor: torch.Tensor
    stored_dtype: torch.dtype


class Reader(AbstractContextManager["Reader"]):
    """Reads the files of one checkpoint; a context manager that ends its checksum thread.

    `num_bytes` and `verified_bytes` count what was read and what was compared with checksums.

    Args:
        checkpoint: the opened directory.
        verify: check what is read whole.
        touched: with `verify`, also read and check the rest of pieces that are read in part.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: bool, touched: bool = False) -> None:
        self._checkpoint = checkpoint
        self._verify = verify
        self.touched = verify and touched
        self._stack = ExitStack()
        self.sums = self._stack.enter_context(Checksums())
        self.sender = self._stack.enter_context(Sender())
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        self.verified_bytes = 0

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, plan: LoadPlan, destinations: Sequence[Destination | None]) -> None:
        """Fill the destinations, by want index, file by file.

        Raises:
            CorruptCheckpointError: a file is missing, too short, cannot be read, or differs from
                its checksums.
            LoadError: a value cannot be converted to the destination's dtype.
        """
        for name, reads in groupby(plan.reads, key=itemgetter(0)):
            path = self._checkpoint.folder / name
            record = self._checkpoint.record(name) if self._verify else None
            with self._checkpoint.opened.open(name) as fd:
                file = _FileReader(self, fd, str(path), record)
                for read in reads:
                    destination = destinations[read.want_index]
                    if destination is not None:
                        file.read(read, destination)
                file.finish()

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return reused memory, uint8 `[num_bytes]`; the previous caller's is overwritten."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]


class _Check(NamedTuple):
    """Bytes in memory that must have a checksum; of `inside` they are the strided runs in it."""

    buffer: memoryview
    inside: Region | None
    crc: int
    piece: Region
    key: str


def _first_damaged(checks: Sequence[_Check]) -> _Check | None:
    for check in checks:
        if check.inside is None:
            crc = crc32(check.buffer)
        else:
            crc = crc_of_runs(check.buffer, check.inside)
        if crc != check.crc:
            return check
    return None


class _FileReader:
    """Reads one open file; neighbouring direct reads become one system call."""

    def __init__(
        self, owner: Reader, fd: int | PositionedFile, path: str, record: FileRecord | None
    ) -> None:
        self._owner = owner
        self._fd = fd
        self._path = path
        self._pieces = _Pieces(record, touched=owner.touched)
        self._batch: list[tuple[Region, memoryview, str]] = []
        self._batch_bytes = 0
        self._batch_end = -1
        self._unchecked: list[PendingSum[_Check | None]] = []

    def read(self, read: Read, destination: Destination) -> None:
        box = destination.tensor
        if box.shape != read.shape:
            box = narrow_box(box, read.offset, read.shape)
        stored_dtype = destination.stored_dtype
        if box.dtype == stored_dtype and is_plain_memory(box):
            self._read_direct(read.region, byte_view(box), destination.key)
            return
        if box.dtype == stored_dtype and box.is_cuda:
            self._read_for_device(read.region, box, destination.key)
            return
        self._flush()
        memory = self._owner.scratch(read.region.num_bytes)
        self._fill(read.region, byte_view(memory), destination.key)
        typed = memory.view(stored_dtype).view(read.shape)
        if box.dtype == stored_dtype:
            bits_of(box).copy_(bits_of(typed))
        else:
            self._convert(typed, box, destination.key)
        self._check_pending()  # the scratch memory is used again

    def _read_for_device(self, region: Region, box: torch.Tensor, key: str) -> None:
        """Read into pinned memory, which is sent when a block of it is full, or the file ends."""
        buffer = self._owner.sender.place(box)
        while buffer is None:
            self._flush()
            self._owner.sender.send()
            buffer = self._owner.sender.place(box)
        self._read_direct(region, buffer, key)

    def finish(self) -> None:
        """Do and check what is still open."""
        self._flush()
        self._owner.sender.send()
        self._check_pending()
        for piece, crc, key in self._pieces.partly_read():
            self._owner.num_bytes += piece.num_bytes
            self._owner.verified_bytes += piece.num_bytes
            if crc_of_file(self._fd, piece) != crc:
                raise self._damaged(piece, key)

    def _convert(self, typed: torch.Tensor, box: torch.Tensor, key: str) -> None:
        try:
            box.copy_(typed)
        except RuntimeError as error:
            raise LoadError(
                f"{key!r} in {self._path}: torch cannot convert {typed.dtype} to {box.dtype}"
            ) from error

    def _read_direct(self, region: Region, buffer: memoryview, key: str) -> None:
        start, run_bytes, counts, _ = region  # no properties: there may be many small reads
        if counts:
            self._flush()
            self._fill(region, buffer, key)
            return
        if start != self._batch_end:
            self._flush()
        self._batch.append((region, buffer, key))
        self._batch_end = start + run_bytes
        self._batch_bytes += run_bytes
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._batch:
            return
        start = self._batch[0][0].start
        self._read_at([buffer for _, buffer, _ in self._batch], start, self._batch[0][2])
        self._start_checks(self._batch)
        self._batch = []
        self._batch_bytes = 0

    def _fill(self, region: Region, buffer: memoryview, key: str) -> None:
        """Read a region into a buffer of its row-major bytes."""
        run = region.run_bytes
        if region.contiguous:
            self._read_at([buffer], region.start, key)
        elif _better_over_gaps(region):
            self._fill_over_gaps(region, buffer, key)
        else:
            done = read_runs(self._fd, buffer, region.run_starts(), run)
            self._owner.num_bytes += done
            if done != len(buffer):
                raise CorruptCheckpointError(
                    f"{self._path}: ends before byte {region.end}, which {key!r} needs"
                )
        self._start_checks([(region, buffer, key)])

    def _fill_over_gaps(self, region: Region, buffer: memoryview, key: str) -> None:
        run, count, stride = region.run_bytes, region.counts[-1], region.strides[-1]
        rows = max(1, _SPAN_BYTES // stride)
        span = torch.empty(rows * stride, dtype=torch.uint8)
        out = torch.frombuffer(buffer, dtype=torch.uint8).view(-1, run)
        outer = Region(region.start, 0, region.counts[:-1], region.strides[:-1])
        done = 0
        for start in outer.run_starts():
            for first in range(0, count, rows):
                n = min(rows, count - first)
                num_bytes = (n - 1) * stride + run
                self._read_at([byte_view(span[:num_bytes])], start + first * stride, key)
                out[done : done + n].copy_(span.as_strided((n, run), (stride, 1)))
                done += n

    def _read_at(self, buffers: Sequence[memoryview], start: int, key: str) -> None:
        wanted = sum(map(len, buffers))
        done = read_at(self._fd, buffers, start)
        self._owner.num_bytes += done
        if done != wanted:
            raise CorruptCheckpointError(
                f"{self._path}: ends at byte {start + done}, but {key!r} needs bytes up to "
                f"{start + wanted}"
            )

    def _start_checks(self, reads: Sequence[tuple[Region, memoryview, str]]) -> None:
        """Check on another thread what a call has read, while the next one reads."""
        checks = []
        alone = self._pieces.alone
        for region, buffer, key in reads:
            known = None if region.counts else alone.get(region[:2])
            if known is not None:
                self._owner.verified_bytes += region.run_bytes
                checks.append(_Check(buffer, None, known, region, key))
                continue
            for piece, crc in self._pieces.within(region, key):
                begin = piece.start - region.start if region.contiguous else 0
                inside = None
                if piece.counts and region.contiguous:
                    inside = Region(begin, piece.run_bytes, piece.counts, piece.strides)
                    begin = 0
                whole = inside or piece is region
                part = buffer if whole else buffer[begin : begin + piece.num_bytes]
                self._owner.verified_bytes += piece.num_bytes if inside else len(part)
                checks.append(_Check(part, inside, crc, piece, key))
        if checks:
            self._unchecked.append(self._owner.sums.call(_first_damaged, checks))

    def _check_pending(self) -> None:
        for pending in self._unchecked:
            damaged = pending.value()
            if damaged is not None:
                raise self._damaged(damaged.piece, damaged.key)
        self._unchecked = []

    def _damaged(self, piece: Region, key: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: {key!r} is damaged: bytes {piece.start} to {piece.end} differ from "
            "their checksum; load an older checkpoint"
        )


def _better_over_gaps(region: Region) -> bool:
    run, stride, count = region.run_bytes, region.strides[-1], region.counts[-1]
    return run < _TINY_RUN_BYTES and stride - run < _PAGE_BYTES and count > _MANY_RUNS


class _Pieces:
    """Finds the checksummed pieces of a file that reads cover, whole or in part.

    `alone` has the checksums of reads (first byte, length) that are one piece each, as most of many
    small ones are.
    """

    def __init__(self, record: FileRecord | None, *, touched: bool) -> None:
        self._record = record or FileRecord(0, (), (), ())
        self._strided = dict(self._record.strided)
        self._by_start = sorted(
            ((piece.start, piece.end, piece) for piece in self._strided), key=itemgetter(0, 1)
        )
        self._longest = max((end - start for start, end, _ in self._by_start), default=0)
        self._touched = touched
        self.alone: dict[tuple[int, int], int] = {}
        if not touched and not self._strided:
            spans = zip(self._record.begins, self._record.lengths, strict=True)
            self.alone = dict(zip(spans, self._record.sums, strict=True))
        self._done: set[Region] = set()
        self._partly: dict[Region, tuple[int, str]] = {}

    def within(self, region: Region, key: str) -> Iterator[tuple[Region, int]]:
        """Yield the pieces that a read covers whole, and remember those that it touches."""
        begins, lengths, sums = self._record.begins, self._record.lengths, self._record.sums
        if region.counts:
            crc = self._strided.get(region)
            if crc is not None:
                self._done.add(region)
                yield region, crc
            elif self._touched:
                self._remember(region, key)
            return
        number, end = bisect_left(begins, region.start), region.end
        while number < len(begins) and begins[number] + lengths[number] <= end:
            begin, length = begins[number], lengths[number]
            is_all = begin == region.start and length == region.run_bytes
            piece = region if is_all else Region(begin, length)
            if self._touched:
                self._done.add(piece)
            yield piece, sums[number]
            number += 1
        for piece in self._strided_between(region.start, end) if self._by_start else ():
            if region.start <= piece.start and piece.end <= end:
                self._done.add(piece)
                yield piece, self._strided[piece]
        if self._touched:
            self._remember(region, key)

    def partly_read(self) -> Iterator[tuple[Region, int, str]]:
        """Yield the pieces that were touched but never read whole."""
        for piece, (crc, key) in self._partly.items():
            if piece not in self._done:
                yield piece, crc, key

    def _remember(self, region: Region, key: str) -> None:
        begins, lengths, sums = self._record.begins, self._record.lengths, self._record.sums
        for start, end in _spans(region):
            number = max(0, bisect_right(begins, start) - 1)
            while number < len(begins) and begins[number] < end:
                if begins[number] + lengths[number] > start:
                    piece = Region(begins[number], lengths[number])
                    self._partly.setdefault(piece, (sums[number], key))
                number += 1
            for piece in self._strided_between(start, end):
                self._partly.setdefault(piece, (self._strided[piece], key))

    def _strided_between(self, start: int, end: int) -> Iterator[Region]:
        """Yield the strided pieces whose extent meets the bytes from `start` to `end`."""
        number = bisect_left(self._by_start, start - self._longest, key=itemgetter(0))
        while number < len(self._by_start) and self._by_start[number][0] < end:
            if self._by_start[number][1] > start:
                yield self._by_start[number][2]
            number += 1


def _spans(region: Region) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of what a region touches; runs that lie close together count as one."""
    if region.contiguous:
        yield region.start, region.end
        return
    inner = region.run_bytes
    outer = region
    if region.strides[-1] < _SPAN_BYTES:
        inner += (region.counts[-1] - 1) * region.strides[-1]
        outer = Region(region.start, 0, region.counts[:-1], region.strides[:-1])
    for start in outer.run_starts():
        yield start, start + inner

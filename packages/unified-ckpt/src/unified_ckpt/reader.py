"""Execute a load plan: read byte ranges into destinations, and check the pieces read whole.

with Reader(checkpoint, verify=True) as reader:
    reader.run(plan, metas, tensors)
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType

import torch

from unified_ckpt.boxes import Region
from unified_ckpt.checkpoint import Checkpoint
from unified_ckpt.checksums import Checksums, PendingSum
from unified_ckpt.errors import CorruptCheckpointError, LoadError
from unified_ckpt.files import open_for_read, read_at
from unified_ckpt.load_plan import LoadPlan, Read
from unified_ckpt.manifest import FileRecord
from unified_ckpt.memory import bits_of, byte_view, is_plain_memory, narrow_box

_BATCH_BYTES = 16 * 1024 * 1024
_PAGE_BYTES = 4096  # the disk reads whole pages, so smaller gaps are read over, not skipped
_SPAN_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Destination:
    """What one want reads into: the tensor, and the dtype in which its values are stored."""

    key: str
    tensor: torch.Tensor
    stored_dtype: torch.dtype


class Reader:
    """Reads the files of one checkpoint; a context manager that ends its checksum thread.

    `num_bytes` and `verified_bytes` count what was read and what was compared with checksums.
    """

    def __init__(self, checkpoint: Checkpoint, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._verify = verify
        self._stack = ExitStack()
        self._sums = self._stack.enter_context(Checksums())
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        self.verified_bytes = 0

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run(self, plan: LoadPlan, destinations: Sequence[Destination | None]) -> None:
        """Fill the destinations, by want index, file by file.

        Raises:
            CorruptCheckpointError: a file is missing, too short, or differs from its checksums.
            LoadError: a value cannot be converted to the destination's dtype.
        """
        for name, reads in groupby(plan.reads, key=lambda read: read.file):
            path = self._checkpoint.folder / name
            record = self._checkpoint.record(name) if self._verify else None
            try:
                with open_for_read(path) as fd:
                    file = _FileReader(self, fd, str(path), record)
                    for read in reads:
                        destination = destinations[read.want_index]
                        if destination is not None:
                            file.read(read, destination)
                    file.finish()
            except FileNotFoundError as error:
                raise CorruptCheckpointError(f"{path}: file is missing") from error

    def start_sum(self, buffer: memoryview) -> PendingSum:
        """Begin to sum a buffer on the checksum thread."""
        return self._sums.start(buffer)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return reused memory, uint8 `[num_bytes]`; the previous caller's is overwritten."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]


class _FileReader:
    """Reads one open file; neighbouring direct reads become one system call."""

    def __init__(self, owner: Reader, fd: int, path: str, record: FileRecord | None) -> None:
        self._owner = owner
        self._fd = fd
        self._path = path
        self._pieces = _Pieces(record)
        self._batch: list[tuple[Region, memoryview, str]] = []
        self._batch_bytes = 0
        self._unchecked: list[tuple[PendingSum, int, Region, str]] = []

    def read(self, read: Read, destination: Destination) -> None:
        box = narrow_box(destination.tensor, read.offset, read.shape)
        stored_dtype = destination.stored_dtype
        if box.dtype == stored_dtype and is_plain_memory(box):
            self._read_direct(read.region, byte_view(bits_of(box)), destination.key)
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

    def finish(self) -> None:
        """Do and check what is still open."""
        self._flush()
        self._check_pending()

    def _convert(self, typed: torch.Tensor, box: torch.Tensor, key: str) -> None:
        try:
            box.copy_(typed)
        except RuntimeError as error:
            raise LoadError(
                f"{key!r} in {self._path}: torch cannot convert {typed.dtype} to {box.dtype}"
            ) from error

    def _read_direct(self, region: Region, buffer: memoryview, key: str) -> None:
        if not region.contiguous:
            self._flush()
            self._fill(region, buffer, key)
            return
        if self._batch and self._batch[-1][0].end != region.start:
            self._flush()
        self._batch.append((region, buffer, key))
        self._batch_bytes += region.num_bytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._batch:
            return
        start = self._batch[0][0].start
        self._read_at([buffer for _, buffer, _ in self._batch], start, self._batch[0][2])
        for region, buffer, key in self._batch:
            self._start_checks(region, buffer, key)
        self._batch = []
        self._batch_bytes = 0

    def _fill(self, region: Region, buffer: memoryview, key: str) -> None:
        """Read a region into a buffer of its row-major bytes."""
        run = region.run_bytes
        if region.contiguous:
            self._read_at([buffer], region.start, key)
        elif region.strides[-1] - run < _PAGE_BYTES and run < _PAGE_BYTES:
            self._fill_over_gaps(region, buffer, key)
        else:
            for number, start in enumerate(region.run_starts()):
                self._read_at([buffer[number * run : (number + 1) * run]], start, key)
        self._start_checks(region, buffer, key)

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

    def _start_checks(self, region: Region, buffer: memoryview, key: str) -> None:
        for piece, crc in self._pieces.within(region):
            begin = piece.start - region.start if region.contiguous else 0
            part = buffer[begin : begin + piece.num_bytes]
            self._owner.verified_bytes += piece.num_bytes
            self._unchecked.append((self._owner.start_sum(part), crc, piece, key))

    def _check_pending(self) -> None:
        for pending, crc, piece, key in self._unchecked:
            if pending.value() != crc:
                raise CorruptCheckpointError(
                    f"{self._path}: {key!r} is damaged: bytes {piece.start} to {piece.end} differ "
                    "from their checksum; load an older checkpoint"
                )
        self._unchecked = []


class _Pieces:
    """Finds the checksummed pieces of a file that a read covers."""

    def __init__(self, record: FileRecord | None) -> None:
        pieces = () if record is None else record.pieces
        self._exact = dict(pieces)
        self._runs = sorted((r.start, r.end, crc) for r, crc in pieces if r.contiguous)
        self._starts = [start for start, _, _ in self._runs]

    def within(self, region: Region) -> Iterator[tuple[Region, int]]:
        if region in self._exact:
            yield region, self._exact[region]
        elif region.contiguous:
            number = bisect_left(self._starts, region.start)
            while number < len(self._runs) and self._runs[number][1] <= region.end:
                start, end, crc = self._runs[number]
                yield Region(start, end - start), crc
                number += 1

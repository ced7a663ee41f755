"""Write one rank's share of a save plan: its byte ranges, checksummed while they are written.

Neighbouring pieces go to the kernel in one call. Memory is bounded: what is not plain CPU memory is
staged piece by piece.

    sums = write_share(plan, shards, rank=0, folder=staging)
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from unified_ckpt.boxes import Region
from unified_ckpt.checksums import Checksums, PendingSum
from unified_ckpt.files import Buffer, open_for_write, write_at
from unified_ckpt.manifest import FileRecord
from unified_ckpt.memory import bits_of, byte_view, contiguous_on_cpu, narrow_box
from unified_ckpt.save_plan import DEFAULT_CHUNK_BYTES, FilePlan, Piece, SavePlan
from unified_ckpt.shard import Shard

_BATCH_BYTES = 16 * 1024 * 1024


def write_share(
    plan: SavePlan, parts: Mapping[str, Sequence[Shard]], *, rank: int, folder: Path
) -> list[list[int]]:
    """Write and fsync this rank's bytes of every file; the folder is left to `sync_tree`.

    Returns:
        Per file of the plan, the CRC-32 of what this rank wrote: the header if it owns the file,
        then its pieces in the plan's order.
    """
    with Checksums() as sums:
        pending = [
            _write_file(file, parts.get(file.part, ()), rank, folder, sums) for file in plan.files
        ]
    return [[crc.value() for crc in file] for file in pending]


def file_records(plan: SavePlan, sums: Sequence[Sequence[Sequence[int]]]) -> dict[str, FileRecord]:
    """Join what `write_share` returned on every rank (`sums[rank][file]`) into manifest records."""
    records = {}
    for number, file in enumerate(plan.files):
        left = [iter(rank_sums[number]) for rank_sums in sums]
        pieces = [(Region(0, len(file.header)), next(left[file.owner]))]
        pieces += [(piece.region, next(left[piece.rank])) for piece in file.pieces]
        records[file.name] = FileRecord(file.num_bytes, tuple(pieces))
    return records


def write_blobs(blobs: Mapping[str, bytes], folder: Path) -> dict[str, FileRecord]:
    """Write and fsync whole files, nested names allowed; return their manifest records.

    Folders are left to `sync_tree`.
    """
    records = {}
    with Checksums() as sums:
        for name, blob in blobs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_for_write(path) as fd:
                write_at(fd, [blob], 0)
                os.fsync(fd)
            pieces = [
                (Region(i, len(chunk)), sums.start(chunk).value())
                for i in range(0, len(blob), DEFAULT_CHUNK_BYTES)
                if (chunk := memoryview(blob)[i : i + DEFAULT_CHUNK_BYTES])
            ]
            records[name] = FileRecord(len(blob), tuple(pieces))
    return records


def _write_file(
    file: FilePlan, shards: Sequence[Shard], rank: int, folder: Path, sums: Checksums
) -> list[PendingSum]:
    mine = [piece for piece in file.pieces if piece.rank == rank]
    if not mine and file.owner != rank:
        return []
    pending: list[PendingSum] = []
    with open_for_write(folder / file.name) as fd:
        batch = _Batch(fd)
        if file.owner == rank:
            pending.append(sums.start(memoryview(file.header)))
            batch.add(0, file.header)
        for piece in mine:
            buffer = _piece_bytes(piece, shards[piece.shard_index])
            pending.append(sums.start(buffer))
            _add_runs(batch, piece.region, buffer)
        batch.flush()
        os.fsync(fd)
    return pending


def _piece_bytes(piece: Piece, shard: Shard) -> memoryview:
    box = narrow_box(shard.tensor.detach(), piece.offset, piece.shape)
    return byte_view(bits_of(contiguous_on_cpu(box)))


def _add_runs(batch: "_Batch", region: Region, buffer: memoryview) -> None:
    if region.contiguous:
        batch.add(region.start, buffer)
        return
    for number, start in enumerate(region.run_starts()):
        batch.add(start, buffer[number * region.run_bytes : (number + 1) * region.run_bytes])


class _Batch:
    """Collects buffers that follow each other in a file, so that one call writes them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0
        self._num_bytes = 0
        self._buffers: list[Buffer] = []

    def add(self, start: int, buffer: Buffer) -> None:
        """Take a buffer for byte `start`, after writing what it does not continue."""
        if start != self._start + self._num_bytes or self._num_bytes >= _BATCH_BYTES:
            self.flush()
            self._start = start
        self._buffers.append(buffer)
        self._num_bytes += len(buffer)

    def flush(self) -> None:
        """Write what was collected."""
        write_at(self._fd, self._buffers, self._start)
        self._start += self._num_bytes
        self._num_bytes = 0
        self._buffers = []

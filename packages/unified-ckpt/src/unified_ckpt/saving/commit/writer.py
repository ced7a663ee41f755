"""Write one rank's share of a save plan: its byte ranges, checksummed while they are written.

Memory is bounded: what is not plain CPU memory is staged piece by piece, that of devices while
earlier pieces are summed and written.

    sums = write_share(plan, shards, rank=0, folder=staging)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from unified_ckpt.devices import Fetcher
from unified_ckpt.files import Buffer
from unified_ckpt.files.checksums import (
    CHUNK_BYTES,
    Checksums,
    PendingSum,
    chunk_lengths,
    crc32,
    crc_of_chunks,
)
from unified_ckpt.files.format import FileRecord
from unified_ckpt.files.format.tables import pack_record
from unified_ckpt.files.storage import Location
from unified_ckpt.geometry import Region, Shard
from unified_ckpt.geometry.tensors import (
    bits_of,
    byte_view,
    contiguous_on_cpu,
    is_plain_memory,
    narrow_box,
)
from unified_ckpt.plans import FilePlan, Piece, SavePlan
from unified_ckpt.saving.commit.sinks import Sink, sink_of

_SENT_BYTES = 5 * CHUNK_BYTES  # at a time to a store, as large as the parts of its objects


def write_share(
    plan: SavePlan, parts: Mapping[str, Sequence[Shard]], *, rank: int, folder: Path | Location
) -> dict[str, bytes]:
    """Write this rank's bytes of every file, durably; a local folder is left to `sync_tree`.

    Returns:
        Of each file that it writes to, by name, the packed record of its own bytes: the header if
        it owns the file, and its pieces, of a contiguous piece each chunk's. See `join_records`.
    """
    if not any(shard.tensor.is_cuda for shards in parts.values() for shard in shards):

        def bytes_of(file: FilePlan, piece: Piece) -> memoryview:
            return _piece_bytes(piece, parts[file.part][piece.shard_index])

        is_staged = not all(
            _is_view(piece, parts[file.part][piece.shard_index])
            for file in plan.files_of(rank)
            for piece in file.pieces
            if piece.rank == rank
        )
        return write_pieces(plan, bytes_of, rank=rank, folder=folder, is_staged=is_staged)
    mine = (
        _piece_box(piece, parts[file.part][piece.shard_index])
        for file in plan.files_of(rank)
        for piece in file.pieces
        if piece.rank == rank
    )
    with Fetcher() as fetcher:
        in_order = fetcher.bytes_of(mine)
        return write_pieces(plan, lambda *_: next(in_order), rank=rank, folder=folder)


def write_pieces(
    plan: SavePlan,
    bytes_of: Callable[[FilePlan, Piece], memoryview],
    *,
    rank: int | None,
    folder: Path | Location,
    is_staged: bool = True,
) -> dict[str, bytes]:
    """As `write_share`, with a function that makes a piece's row-major bytes when it is written.

    It is called once for each piece of this rank, or with None of all ranks, in the plan's order.
    If not `is_staged`, the bytes lie in memory that is there anyway.
    """
    sink = sink_of(folder, is_staged=is_staged)
    files = plan.files if rank is None else plan.files_of(rank)
    with Checksums() as sums:
        pending = [_write_file(file, bytes_of, rank, sink, sums) for file in files]
    return {
        file.name: _record(file, [crc for sums in file_sums for crc in sums.value()], rank)
        for file, file_sums in zip(files, pending, strict=True)
    }


def _record(file: FilePlan, sums: Sequence[int], rank: int | None) -> bytes:
    left = iter(sums)
    regions = [Region(0, len(file.header))] if rank in (None, file.owner) else []
    regions += [piece.region for piece in file.pieces if rank in (None, piece.rank)]
    pieces = [pair for region in regions for pair in _summed(region, left)]
    return pack_record(FileRecord.of(file.num_bytes, pieces))


def _summed(region: Region, sums: Iterator[int]) -> Iterator[tuple[Region, int]]:
    """Pair a piece, or each chunk of a contiguous one, with its checksum."""
    if region.counts or region.run_bytes <= CHUNK_BYTES:
        yield region, next(sums)
        return
    start = region.start
    for length in chunk_lengths(region.run_bytes):
        yield Region(start, length), next(sums)
        start += length


def write_blobs(blobs: Mapping[str, bytes], folder: Path | Location) -> dict[str, bytes]:
    """Write whole files, durably, nested names allowed; return their packed records.

    Local folders are left to `sync_tree`.
    """
    sink = sink_of(folder)
    records = {}
    for name, blob in blobs.items():
        sink.write(name, [(0, blob)], num_bytes=len(blob))
        whole = Region(0, len(blob))
        pieces = list(_summed(whole, iter(crc_of_chunks(memoryview(blob))))) if blob else []
        records[name] = pack_record(FileRecord.of(len(blob), pieces))
    return records


def _write_file(
    file: FilePlan,
    bytes_of: Callable[[FilePlan, Piece], memoryview],
    rank: int | None,
    sink: Sink,
    sums: Checksums,
) -> list[PendingSum[list[int]]]:
    pending: list[PendingSum[list[int]]] = []

    def runs() -> Iterator[tuple[int, Buffer]]:
        if rank in (None, file.owner):
            pending.append(sums.start_chunks(memoryview(file.header)))
            yield 0, file.header
        for piece in file.pieces:
            if rank not in (None, piece.rank):
                continue
            buffer = bytes_of(file, piece)
            if piece.region.counts:
                pending.append(sums.call(lambda b: [crc32(b)], buffer))
            elif sink.in_chunks:
                known: list[int] = []
                pending.append(PendingSum(known))
                yield from _chunks(piece.region.start, buffer, known)
                continue
            else:
                pending.append(sums.start_chunks(buffer))
            yield from _runs(piece.region, buffer)

    sink.write(file.name, runs(), num_bytes=file.num_bytes)
    return pending


def _chunks(start: int, buffer: memoryview, sums: list[int]) -> Iterator[tuple[int, Buffer]]:
    """Yield a contiguous piece in parts, each summed just before."""
    for begin in range(0, len(buffer), _SENT_BYTES):
        part = buffer[begin : begin + _SENT_BYTES]
        sums += crc_of_chunks(part)
        yield start + begin, part


def _piece_bytes(piece: Piece, shard: Shard) -> memoryview:
    if _is_view(piece, shard):
        return byte_view(shard.tensor)  # by far the most; the rest of this function costs more
    return byte_view(bits_of(contiguous_on_cpu(_piece_box(piece, shard))))


def _is_view(piece: Piece, shard: Shard) -> bool:
    return piece.shape == shard.box.local_shape and is_plain_memory(shard.tensor)


def _piece_box(piece: Piece, shard: Shard) -> torch.Tensor:
    return narrow_box(shard.tensor.detach(), piece.offset, piece.shape)


def _runs(region: Region, buffer: memoryview) -> Iterator[tuple[int, Buffer]]:
    if region.contiguous:
        yield region.start, buffer
        return
    for number, start in enumerate(region.run_starts()):
        yield start, buffer[number * region.run_bytes : (number + 1) * region.run_bytes]

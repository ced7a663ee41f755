"""What a manifest says of one file: its size and the CRC-32 of its pieces.

A piece is a region of a file: one run of bytes, or the strided runs of a box that one of several
writers of the file held. Ranks hand records on as bytes (`pack_record`), which the first rank joins
without looking at single pieces: a file of 5 GB has 5,000 of them, a checkpoint ten million.

    record = FileRecord.of(2, [(Region(0, 2), 0x36DE2269)])
    unpack_record(pack_record(record)) == record
"""

import binascii
import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import Region

_HEAD = struct.Struct("<QIII")  # size of the file; groups, sums, words of strided pieces
_GROUP = struct.Struct("<QQQ")  # first byte, number and length of pieces that follow each other


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size and its pieces with their CRC-32, which together cover every byte.

    Attributes:
        num_bytes: size of the file.
        begins: where each contiguous piece begins, ascending.
        lengths: bytes of each contiguous piece.
        sums: CRC-32 of each contiguous piece.
        strided: the other pieces, each with its CRC-32.
    """

    num_bytes: int
    begins: tuple[int, ...]
    lengths: tuple[int, ...]
    sums: tuple[int, ...]
    strided: tuple[tuple[Region, int], ...] = ()

    @classmethod
    def of(cls, num_bytes: int, pieces: Iterable[tuple[Region, int]]) -> "FileRecord":
        """Make a record from (region, CRC-32) pairs in any order."""
        runs: list[tuple[int, int, int]] = []
        strided = []
        for region, crc in pieces:
            if region.counts:
                strided.append((region, crc))
            else:
                runs.append((region.start, region.run_bytes, crc))
        runs.sort()
        begins, lengths, sums = zip(*runs, strict=True) if runs else ((), (), ())
        return cls(num_bytes, begins, lengths, sums, tuple(strided))

    def pieces(self) -> Iterator[tuple[Region, int]]:
        """Yield every piece: its region and CRC-32."""
        for begin, length, crc in zip(self.begins, self.lengths, self.sums, strict=True):
            yield Region(begin, length), crc
        yield from self.strided

    @property
    def covered_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.lengths) + sum(region.num_bytes for region, _ in self.strided)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        ends = [b + n for b, n in zip(self.begins, self.lengths, strict=True)]
        breaks = [i for i in range(1, len(ends)) if ends[i - 1] != self.begins[i]]
        bounds = [0, *breaks, len(self.begins)] if self.begins else [0]
        runs = [
            [self.begins[i], list(self.lengths[i:j]), _sums_to_text(self.sums[i:j])]
            for i, j in pairwise(bounds)
        ]
        strided = [[r.start, r.run_bytes, r.counts, r.strides, crc] for r, crc in self.strided]
        return {"bytes": self.num_bytes, "runs": runs, "strided": strided}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileRecord":
        """Undo `to_json`."""
        begins: list[int] = []
        lengths: list[int] = []
        sums: list[int] = []
        for start, run_lengths, text in value["runs"]:
            check_numbers([start, *run_lengths])
            *run_begins, _ = accumulate(run_lengths, initial=start)
            run_sums = _text_to_sums(text)
            if len(run_sums) != len(run_lengths):
                raise CheckpointValueError(f"{len(run_sums)} sums for {len(run_lengths)} pieces")
            begins += run_begins
            lengths += run_lengths
            sums += run_sums
        strided = tuple(_strided_piece(piece) for piece in value["strided"])
        check_numbers([value["bytes"]])
        record = cls(value["bytes"], tuple(begins), tuple(lengths), tuple(sums), strided)
        record.check_bounds()
        return record

    def check_bounds(self) -> None:
        """Refuse what would make a reader work longer than the file is."""
        ends = [b + n for b, n in zip(self.begins, self.lengths, strict=True)]
        if any(end > begin for end, begin in zip(ends, self.begins[1:], strict=False)):
            raise CheckpointValueError("pieces overlap or are not in order")
        ends += [region.end for region, _ in self.strided]
        if ends and max(ends) > self.num_bytes:
            raise CheckpointValueError(f"a piece ends at byte {max(ends)} of {self.num_bytes}")
        if self.covered_bytes > self.num_bytes:
            raise CheckpointValueError(f"pieces of {self.covered_bytes} bytes for {self.num_bytes}")


def pack_record(record: FileRecord) -> bytes:
    """Return a record, or what one of several writers of a file knows of it, as bytes."""
    groups: list[list[int]] = []
    for begin, length in zip(record.begins, record.lengths, strict=True):
        if groups and groups[-1][2] == length and _group_end(groups[-1]) == begin:
            groups[-1][1] += 1
        else:
            groups.append([begin, 1, length])
    strided = [
        (len(r.counts), r.start, r.run_bytes, crc, *r.counts, *r.strides)
        for r, crc in record.strided
    ]
    words = [*chain.from_iterable(strided)]
    return b"".join(
        (
            _HEAD.pack(record.num_bytes, len(groups), len(record.sums), len(words)),
            *(_GROUP.pack(*group) for group in groups),
            struct.pack(f"<{len(record.sums)}I", *record.sums),
            struct.pack(f"<{len(words)}Q", *words),
        )
    )


def _group_end(group: Sequence[int]) -> int:
    """Return the byte after the pieces of a group: (first byte, number, length)."""
    return group[0] + group[1] * group[2]


def unpack_record(raw: bytes) -> FileRecord:
    """Undo `pack_record`.

    Raises:
        CheckpointValueError: it is not what that returns.
    """
    num_bytes, groups, sums, words = _split(raw)
    if sum(count for _, count, _ in groups) * 4 != len(sums) or not all(
        length for _, _, length in groups
    ):
        raise CheckpointValueError(f"{len(sums)} bytes of checksums for other pieces")
    begins = chain.from_iterable(range(b, b + n * length, length) for b, n, length in groups)
    lengths = chain.from_iterable([length] * n for _, n, length in groups)
    record = FileRecord(
        num_bytes,
        tuple(begins),
        tuple(lengths),
        struct.unpack(f"<{len(sums) // 4}I", sums),
        tuple(_strided_pieces(words)),
    )
    record.check_bounds()
    return record


def packed_size(raw: bytes) -> int:
    """Return the size of the file that a packed record is of."""
    size: int = _HEAD.unpack_from(raw)[0]
    return size


def encode_records(records: Mapping[str, bytes]) -> bytes:
    """Return packed records by name as one text, for another rank."""
    head = json.dumps({name: len(raw) for name, raw in records.items()}).encode()
    return b"".join((head, b"\n", *records.values()))


def decode_records(raw: bytes) -> dict[str, bytes]:
    """Undo `encode_records`."""
    head, _, body = raw.partition(b"\n")
    found, at = {}, 0
    for name, length in json.loads(head).items():
        found[name] = body[at : at + length]
        at += length
    return found


def join_records(fragments: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Join what the writers know of each file, by name, into packed records of the whole files."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for known in fragments:
        for name, raw in known.items():
            found[name].append(raw)
    return {name: raws[0] if len(raws) == 1 else _joined(raws) for name, raws in found.items()}


def _joined(raws: Sequence[bytes]) -> bytes:
    """Join packed records of one file, whose groups of pieces do not overlap."""
    rows: list[tuple[tuple[int, int, int], memoryview]] = []
    all_words: list[int] = []
    size = 0
    for raw in raws:
        size, groups, sums, words = _split(raw)
        at = 0
        for group in groups:
            rows.append((group, memoryview(sums)[at : at + 4 * group[1]]))
            at += 4 * group[1]
        all_words += words
    rows.sort(key=lambda row: row[0])
    num_sums = sum(group[1] for group, _ in rows)
    return b"".join(
        (
            _HEAD.pack(size, len(rows), num_sums, len(all_words)),
            *(_GROUP.pack(*group) for group, _ in rows),
            *(sums for _, sums in rows),
            struct.pack(f"<{len(all_words)}Q", *all_words),
        )
    )


def _split(raw: bytes) -> tuple[int, list[tuple[int, int, int]], bytes, tuple[int, ...]]:
    """Return a packed record's size, groups, checksums (bytes) and words of strided pieces."""
    if len(raw) < _HEAD.size:
        raise CheckpointValueError(f"{len(raw)} bytes are too few for a record")
    num_bytes, num_groups, num_sums, num_words = _HEAD.unpack_from(raw)
    sums_at = _HEAD.size + num_groups * _GROUP.size
    words_at = sums_at + 4 * num_sums
    if len(raw) != words_at + 8 * num_words:
        raise CheckpointValueError(f"{len(raw)} bytes are no record of so many pieces")
    groups = [*_GROUP.iter_unpack(raw[_HEAD.size : sums_at])]
    return (
        num_bytes,
        groups,
        raw[sums_at:words_at],
        struct.unpack_from(f"<{num_words}Q", raw, words_at),
    )


def _strided_pieces(words: Sequence[int]) -> Iterator[tuple[Region, int]]:
    at = 0
    while at < len(words):
        num_dims = words[at]
        numbers = words[at + 1 : at + 4 + 2 * num_dims]
        if num_dims > len(words) or len(numbers) != 3 + 2 * num_dims:
            raise CheckpointValueError("a strided piece is cut short")
        start, run_bytes, crc, *dims = numbers
        yield _strided_piece([start, run_bytes, dims[:num_dims], dims[num_dims:], crc])
        at += 4 + 2 * num_dims


def _strided_piece(piece: Sequence[Any]) -> tuple[Region, int]:
    start, run_bytes, counts, strides, crc = piece
    check_numbers([start, run_bytes, crc, *counts, *strides])
    if len(counts) != len(strides) or not counts or not (run_bytes and all(counts)):
        raise CheckpointValueError(f"strided piece {piece!r}")
    return Region(start, run_bytes, tuple(counts), tuple(strides)), crc


def check_numbers(values: Sequence[Any]) -> None:
    """Refuse values that are not natural numbers."""
    if set(map(type, values)) - {int} or (values and min(values) < 0):
        raise CheckpointValueError("a size, place or checksum is not a natural number")


def _sums_to_text(sums: Sequence[int]) -> str:
    """Write 32-bit checksums as text of 8 hexadecimal digits each."""
    return struct.pack(f">{len(sums)}I", *sums).hex()


def _text_to_sums(text: str) -> tuple[int, ...]:
    raw = binascii.unhexlify(text)
    if len(raw) % 4:
        raise CheckpointValueError(f"{len(raw)} bytes of checksums are not a multiple of 4")
    return struct.unpack(f">{len(raw) // 4}I", raw)

"""One file of a save: its stored tensors, and the bytes of them that each rank writes.

The stored tensors of a save are columns of numbers; those of a file are made from them when they
are asked for, since a rank needs those of the files that it writes only.

    plan.files[0].pieces  # what is written after plan.files[0].header
"""

import itertools
import operator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unified_ckpt.files.format import HeaderEntry, encode_header
from unified_ckpt.geometry import Region, Shape, box_region, split_box
from unified_ckpt.geometry.tensors import dtype_of
from unified_ckpt.plans.columns import BoxTable, Writers


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that one rank writes and checksums as one: a box of one of its shards.

    `shard_index` counts in the rank's list of the file's part; `offset` is relative to that shard.
    """

    rank: int
    shard_index: int
    offset: Shape
    shape: Shape
    region: Region


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box of a stored tensor and who writes it: `shard_index` of the rank's list of the part."""

    offset: Shape
    shape: Shape
    rank: int
    shard_index: int


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A stored tensor, and the boxes that it is written in."""

    key: str
    dtype: str
    shape: Shape
    boxes: tuple[WrittenBox, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class FilePlan:
    """One safetensors file: `owner` writes the header, `pieces` tile the bytes after it.

    `tensors`, `header`, `entries` and `pieces` are made when they are asked for, as a rank needs
    those of the files that it writes only.
    """

    name: str
    part: str
    owner: int
    writers: frozenset[int]
    tensor_bytes: int
    num_tensors: int
    chunk_bytes: int
    columns: "StoredColumns" = field(repr=False)
    place: tuple[int, int] = field(repr=False)

    @cached_property
    def tensors(self) -> tuple[WrittenTensor, ...]:
        """The stored tensors, in the order of their bytes."""
        return self.columns.tensors(*self.place)

    @cached_property
    def _layout(self) -> tuple[bytes, tuple[HeaderEntry, ...]]:
        return encode_header(
            [HeaderEntry(key=t.key, dtype=t.dtype, shape=t.shape) for t in self.tensors]
        )

    @property
    def header(self) -> bytes:
        """The first bytes of the file, before the tensors."""
        return self._layout[0]

    @property
    def entries(self) -> tuple[HeaderEntry, ...]:
        """The tensors with their places in the file, in that order."""
        return self._layout[1]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.tensor_bytes

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is written after the header, in the order of the tensors."""
        return tuple(
            piece
            for tensor, entry in zip(self.tensors, self.entries, strict=True)
            for piece in _pieces(tensor, entry, self.chunk_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredColumns:
    """The stored tensors of a save, by file; columns are `[stored tensors]`.

    Attributes:
        table: the boxes of all ranks.
        first_row: row of the table that names each tensor first, `[tensors]`.
        writers: who writes each box.
        row: a row of the table that is each box, `[boxes]`.
        tensor: which tensor one is, or a box of.
        first_box: its first box.
        end_box: the one after its last.
        num_bytes: its size.
    """

    table: BoxTable
    first_row: torch.Tensor
    writers: Writers
    row: torch.Tensor
    tensor: torch.Tensor
    first_box: torch.Tensor
    end_box: torch.Tensor
    num_bytes: torch.Tensor

    def put_in_order(self, order: torch.Tensor) -> None:
        """Put the stored tensors in another order, in place: one column needs memory at a time."""
        for column in (self.tensor, self.first_box, self.end_box, self.num_bytes):
            column.copy_(column[order])

    def keys(self, begin: int, end: int) -> list[str]:
        """Return the keys of some stored tensors."""
        tensors = self.tensor[begin:end]
        boxed = self.writers.split[tensors]
        keys = [self.table.keys[number] for number in tensors.tolist()]
        rows = self.row[self.first_box[begin:end][boxed]]
        places = boxed.nonzero().squeeze(1).tolist()
        for place, (shape, offset, local) in zip(places, self.table.tuples(rows), strict=True):
            keys[place] = split_key(keys[place], offset, local, shape)
        return keys

    def tensors(self, begin: int, end: int) -> tuple[WrittenTensor, ...]:
        """Return some stored tensors, in the order in which a file holds them."""
        first_row = self.first_row[self.tensor[begin:end]]
        first, last = self.first_box[begin:end].tolist(), self.end_box[begin:end].tolist()
        boxes = torch.tensor(
            [*itertools.chain.from_iterable(map(range, first, last))], dtype=torch.int64
        )
        row = self.writers.row[boxes]
        made = [
            WrittenBox(offset, local, rank, index)
            for (_, offset, local), rank, index in zip(
                self.table.tuples(row),
                self.table.rank[row].tolist(),
                self.table.index[row].tolist(),
                strict=True,
            )
        ]
        shapes = [dims[0] for dims in self.table.tuples(first_row)]
        split = self.writers.split[self.tensor[begin:end]].tolist()
        dtypes = [self.table.dtypes[code] for code in self.table.dtype[first_row].tolist()]
        found, at = [], 0
        for number, key in enumerate(self.keys(begin, end)):
            count = last[number] - first[number]
            of_tensor, shape = made[at : at + count], shapes[number]
            at += count
            if split[number]:
                (box,) = of_tensor
                shape = box.shape
                of_tensor = [WrittenBox((0,) * len(shape), shape, box.rank, box.shard_index)]
            found.append(WrittenTensor(key, dtypes[number], shape, tuple(of_tensor)))
        # Wide dtypes first keeps every tensor aligned to its own item size, as readers that map
        # like.
        return tuple(sorted(found, key=lambda t: (-dtype_of(t.dtype).itemsize_bytes, t.key)))


def split_key(key: str, offset: Shape, shape: Shape, global_shape: Shape) -> str:
    """Return the stored key of a box that is a stored tensor of its own: `KEY@0:4,8:16@4,16`."""
    box = ",".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
    return f"{key}@{box}@{','.join(map(str, global_shape))}"


def _pieces(tensor: WrittenTensor, entry: HeaderEntry, chunk_bytes: int) -> list[Piece]:
    num_bytes = entry.end - entry.begin
    if len(tensor.boxes) == 1 and num_bytes <= chunk_bytes:  # most, and much faster
        (box,) = tensor.boxes
        region = Region(entry.begin, num_bytes)
        return [Piece(box.rank, box.shard_index, (0,) * len(tensor.shape), tensor.shape, region)]
    size = dtype_of(tensor.dtype).itemsize_bytes
    pieces = []
    for box in tensor.boxes:
        for offset, shape in split_box(box.shape, size, chunk_bytes):
            absolute = tuple(map(operator.add, box.offset, offset))
            region = box_region(
                tensor.shape, absolute, shape, itemsize_bytes=size, start=entry.begin
            )
            pieces.append(Piece(box.rank, box.shard_index, offset, shape, region))
    return pieces

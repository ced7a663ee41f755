"""Cuts of a tensor dim by dim, as plain numbers: which cells meet a cell, without a look at others.

`cells.py` answers for all ranks at once; this one for a single rank, in time that grows with what
it finds and not with the mesh. A `Tile` is a cell here: a box, or a range of its elements.

Invariant: tiles have the numbers of `Cells.cell`, and what two tiles share is a range of the
row-major elements of the intersection of their boxes.

    tiling = tiling_of((6, 512), spec, (0, 0))
    list(tiling.meeting(tiling.tile_at(3)))     # that tile, and no other
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from mesh_spmd.layout import FlatSpec, Spec, dim_bounds
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard.caches import remembered

Point = tuple[int, ...]


class Tile(NamedTuple):
    """A cell: its number, the position of its first holder but for replicas, its box, its range.

    `range` is None where the whole box is meant.
    """

    number: int
    base: int
    low: Point
    high: Point
    range: tuple[int, int] | None


class Meeting(NamedTuple):
    """What a tile shares with another one: elements `begin` to `end` of a box."""

    number: int
    base: int
    offset: Point
    shape: Point
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tiling:
    """How all ranks of a mesh cut a tensor.

    Attributes:
        bounds: for each dim the bounds of its pieces; a scalar counts as one dim of size 1.
        digits: for each dim (stride in the mesh, size) of each axis that cuts it, outermost first.
        bases: for each dim what each piece adds to the position of a rank that holds it.
        flat: how the elements of boxes are cut, with `part_digits` and `part_bases` as above.
        replicas: what the replicas of a tile add to that position, ascending.
    """

    mesh: ProcessMesh
    bounds: tuple[tuple[int, ...], ...]
    digits: tuple[tuple[tuple[int, int], ...], ...]
    bases: tuple[Sequence[int], ...]
    flat: FlatSpec | None
    part_digits: tuple[tuple[int, int], ...]
    part_bases: Sequence[int]
    replicas: Sequence[int]

    def tile_at(self, position: int) -> Tile:
        """Return the tile that the rank at `position` of the mesh holds."""
        return self.tile(
            [_piece_at(position, digits) for digits in self.digits],
            _piece_at(position, self.part_digits),
        )

    def tile(self, pieces: Sequence[int], part: int) -> Tile:
        """Return the tile of these pieces, one for each dim, and of this part of the box."""
        number, base = 0, self.part_bases[part]
        low, high = [], []
        for piece, bounds, bases in zip(pieces, self.bounds, self.bases, strict=True):
            number = number * len(bases) + piece
            base += bases[piece]
            low.append(bounds[piece])
            high.append(bounds[piece + 1])
        flat = None
        if self.flat is not None:
            numel = math.prod(b - a for a, b in zip(low, high, strict=True))
            edges = self.flat.bounds(numel)
            flat = edges[part], edges[part + 1]
        number = number * len(self.part_bases) + part
        return Tile(number, base, tuple(low), tuple(high), flat)

    def numbered(self, number: int) -> Tile:
        """Return the tile of a number."""
        number, part = divmod(number, len(self.part_bases))
        pieces = []
        for bases in reversed(self.bases):
            number, piece = divmod(number, len(bases))
            pieces.append(piece)
        return self.tile(pieces[::-1], part)

    def holders(self, base: int) -> list[int]:
        """Return the positions of a tile's holders, as a row of `Cells.holders`."""
        found = [base + other for other in self.replicas]
        ranks = self.mesh.ranks
        return found if len(found) == 1 else sorted(found, key=ranks.__getitem__)

    def meeting(self, tile: Tile) -> Iterator[Meeting]:
        """Yield what each tile shares with `tile`, which may be one of another tiling."""
        rows = [
            _pieces_between(low, high, bounds, bases)
            for low, high, bounds, bases in zip(
                tile.low, tile.high, self.bounds, self.bases, strict=True
            )
        ]
        counts = [len(bases) for bases in self.bases]
        for pieces in product(*rows):
            number = base = 0
            numel = 1
            for (piece, at, _, length), count in zip(pieces, counts, strict=True):
                number = number * count + piece
                base += at
                numel *= length
            offset = tuple([piece[2] for piece in pieces])
            shape = tuple([piece[3] for piece in pieces])
            begin, end = 0, numel
            if tile.range is not None:
                begin, end = _range_in(offset, shape, tile)
            if self.flat is None:
                if begin < end:
                    yield Meeting(number, base, offset, shape, begin, end)
                continue
            yield from self._parts(Meeting(number, base, offset, shape, begin, end), pieces)

    def _parts(
        self, box: Meeting, pieces: Sequence[tuple[int, int, int, int]]
    ) -> Iterator[Meeting]:
        """What the flat parts of one box share with a tile that shares `box` with all of it."""
        if box.begin >= box.end:
            return
        numbers = [piece[0] for piece in pieces]
        for part in self._parts_between(box, numbers):
            low, high = _range_in(box.offset, box.shape, self.tile(numbers, part))
            low, high = max(low, box.begin), min(high, box.end)
            if low < high:
                number = box.number * len(self.part_bases) + part
                base = box.base + self.part_bases[part]
                yield Meeting(number, base, box.offset, box.shape, low, high)

    def _parts_between(self, box: Meeting, pieces: Sequence[int]) -> range:
        """Which parts hold the elements from the first to the last one of a box."""
        first = last = 0
        numel = 1
        for start, length, piece, bounds in zip(
            box.offset, box.shape, pieces, self.bounds, strict=True
        ):
            size, at = bounds[piece + 1] - bounds[piece], start - bounds[piece]
            first, last = first * size + at, last * size + at + length - 1
            numel *= size
        edges = self.flat.bounds(numel) if self.flat else (0, numel)
        return range(max(0, bisect_right(edges, first) - 1), bisect_left(edges, last + 1))


@remembered(maxsize=1024)
def tiling_of(shape: tuple[int, ...], spec: Spec | FlatSpec, shift: tuple[int, ...]) -> Tiling:
    """Return how a tensor of `shape`, `shift` elements from where it is, is cut.

    Partial counts as replicated.
    """
    boxes = spec.spec if isinstance(spec, FlatSpec) else spec
    bounds = dim_bounds(shape, boxes)
    if any(shift):
        moved = zip(bounds, shift, strict=True)
        bounds = [tuple([edge + move for edge in edges]) for edges, move in moved]
    sizes = boxes.mesh.shape
    strides = [1] * len(sizes)
    for axis in range(len(sizes) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * sizes[axis]
    used = [False] * len(sizes)

    def digits_of(axes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        for axis in axes:
            used[axis] = True
        return tuple([(strides[axis], sizes[axis]) for axis in axes])

    digits = [digits_of(axes) for axes in boxes.nesting(len(shape))]
    flat = spec if isinstance(spec, FlatSpec) else None
    part = digits_of([boxes.mesh.axis_index(a) for a in flat.axes]) if flat else ()
    free = tuple([(strides[a], sizes[a]) for a in range(len(sizes)) if not used[a]])
    return Tiling(
        mesh=boxes.mesh,
        bounds=tuple(bounds) or ((0, 1),),
        digits=tuple(digits) or ((),),
        bases=tuple([_bases(d) for d in digits]) or ((0,),),
        flat=flat,
        part_digits=part,
        part_bases=_bases(part),
        replicas=_bases(free),
    )


def overlap(a: Tile, b: Tile) -> Meeting | None:
    """Return what two tiles share, under the number of `b`; None if they share nothing."""
    offset = tuple(map(max, a.low, b.low))
    shape = tuple([max(0, min(x, y) - o) for x, y, o in zip(a.high, b.high, offset, strict=True)])
    begin, end = 0, math.prod(shape)
    for tile in (a, b):
        if tile.range is not None and end:
            low, high = _range_in(offset, shape, tile)
            begin, end = max(begin, low), min(end, high)
    return Meeting(b.number, b.base, offset, shape, begin, end) if begin < end else None


def _bases(digits: Sequence[tuple[int, int]]) -> Sequence[int]:
    """What each index along nested axes adds to a position, in order."""
    if not digits:
        return (0,)
    stride, size = digits[0]
    found: Sequence[int] = range(0, stride * size, stride)
    for stride, size in digits[1:]:
        found = [base + more for base in found for more in range(0, stride * size, stride)]
    return found


def _piece_at(position: int, digits: Sequence[tuple[int, int]]) -> int:
    piece = 0
    for stride, size in digits:
        piece = piece * size + position // stride % size
    return piece


def _pieces_between(
    low: int, high: int, bounds: tuple[int, ...], bases: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Each piece that meets `low` to `high`: number, base, begin and length of what is shared."""
    if len(bounds) == 2:
        low, high = max(low, bounds[0]), min(high, bounds[1])
        return [(0, 0, low, high - low)] if low < high else []
    found = []
    first = max(0, bisect_right(bounds, low) - 1)
    for piece in range(first, min(bisect_left(bounds, high), len(bounds) - 1)):
        begin, end = max(low, bounds[piece]), min(high, bounds[piece + 1])
        if begin < end:
            found.append((piece, bases[piece], begin, end - begin))
    return found


def _range_in(offset: Point, shape: Point, tile: Tile) -> tuple[int, int]:
    """Which elements of a box, itself a part of the tile's box, are in the tile's range."""
    if tile.range is None:
        return 0, math.prod(shape)
    lengths = [high - low for low, high in zip(tile.low, tile.high, strict=True)]
    starts = [o - low for o, low in zip(offset, tile.low, strict=True)]
    begin, end = tile.range
    return _before(starts, shape, lengths, begin), _before(starts, shape, lengths, end)


def _before(starts: Sequence[int], shape: Point, lengths: Sequence[int], index: int) -> int:
    """How many elements of an inner box stand before element `index` of the outer one."""
    inner, rows = math.prod(lengths), math.prod(shape)
    count = 0
    for start, size, length in zip(starts, shape, lengths, strict=True):
        inner //= length
        rows //= size
        at = index // inner - start
        if at < 0:
            return count
        if at >= size:
            return count + size * rows
        count += at * rows
        index %= inner
    return count

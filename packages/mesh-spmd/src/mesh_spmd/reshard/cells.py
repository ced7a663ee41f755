"""What every rank of a mesh holds of a tensor, as columns of numbers, and what two layouts share.

A cell is a range of the row-major elements of a box: all of them, unless the layout is flat. Ranks
that hold the same cell are its holders; every cell of a layout has equally many.

Invariant: the cells tile the tensor. What two cells share is again a range of a box: in each box,
row-major order is the order of global coordinates, so that ranges of two boxes that overlap are
ranges of their intersection.

    cells = cells_of((6, 512), spec, shift=(0, 0))
    shared(cells, cells)     # elements of each rank's cell that it shares with itself: all
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from mesh_spmd.layout import FlatSpec, Spec, dim_bounds
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard.caches import remembered

Column = torch.Tensor  # int64, one number for each rank of the mesh, or one for all


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of all ranks of a mesh, in mesh order.

    Attributes:
        offset: where each box begins, a column for each dim; a scalar counts as one dim of size 1.
        length: how long it is, likewise.
        span: the coordinates of the first element and of that behind the last one, a column for
            each dim; None where each cell is its whole box.
        numel: elements of each cell.
        cell: the number of each rank's cell.
        holders: [cells, replicas] positions in the mesh, ranks ascending in each row.
    """

    offset: tuple[Column, ...]
    length: tuple[Column, ...]
    span: tuple[tuple[Column, ...], tuple[Column, ...]] | None
    numel: Column
    cell: Column
    holders: torch.Tensor

    @property
    def num_replicas(self) -> int:
        """How many ranks hold each cell."""
        return self.holders.shape[1]

    def pick(self, positions: torch.Tensor) -> Cells:
        """The cells of the ranks at `positions` of the mesh, without their holders."""
        span = self.span and (
            tuple(c[positions] for c in self.span[0]),
            tuple(c[positions] for c in self.span[1]),
        )
        return Cells(
            tuple(c[positions] for c in self.offset),
            tuple(c[positions] for c in self.length),
            span,
            self.numel[positions],
            self.cell[positions],
            self.holders,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What pairs of cells share: a box for each pair, and a range of its elements."""

    offset: tuple[Column, ...]
    length: tuple[Column, ...]
    begin: Column
    end: Column

    @property
    def numel(self) -> Column:
        """How many elements each pair shares."""
        return self.end - self.begin


@remembered(maxsize=256)
def cells_of(shape: tuple[int, ...], spec: Spec | FlatSpec, shift: tuple[int, ...]) -> Cells:
    """Return the cells of a tensor of `shape`, `shift` elements along each dim from where it is.

    Partial counts as replicated.
    """
    boxes = spec.spec if isinstance(spec, FlatSpec) else spec
    grid = _grid(spec, len(shape))
    offset, length = [], []
    for move, bound, piece in zip(shift, dim_bounds(shape, boxes), grid.pieces, strict=True):
        if len(bound) == 2:
            offset.append(torch.full_like(piece, move))
            length.append(torch.full_like(piece, bound[1]))
            continue
        edges = torch.tensor(bound)
        begin = edges[piece]
        offset.append(begin + move if move else begin)
        length.append(edges.diff()[piece])
    if not shape:
        offset, length = [torch.zeros_like(grid.cell)], [torch.ones_like(grid.cell)]
    numel, span = _numel(length), None
    if isinstance(spec, FlatSpec) and grid.part is not None:
        begin, end = _flat_ranges(spec, numel, grid.part)
        span = (_point(offset, length, begin), _point(offset, length, end))
        numel = end - begin
    return Cells(tuple(offset), tuple(length), span, numel, grid.cell, grid.holders)


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """What does not depend on sizes: whose is which piece of each dim, and which cell."""

    pieces: tuple[Column, ...]
    part: Column | None
    cell: Column
    holders: torch.Tensor


@remembered(maxsize=256)
def _grid(spec: Spec | FlatSpec, ndim: int) -> _Grid:
    boxes = spec.spec if isinstance(spec, FlatSpec) else spec
    at = _coordinates(boxes.mesh)
    cell, num_cells = torch.zeros(boxes.mesh.size, dtype=torch.int64), 1
    pieces, part = [], None
    for axes in boxes.nesting(ndim):
        piece, count = _mixed(at, boxes.mesh, axes)
        pieces.append(piece)
        cell, num_cells = cell * count + piece, num_cells * count
    if isinstance(spec, FlatSpec):
        part, count = _mixed(at, boxes.mesh, [boxes.mesh.axis_index(a) for a in spec.axes])
        cell, num_cells = cell * count + part, num_cells * count
    by_rank = torch.tensor(boxes.mesh.ranks).argsort()
    order = by_rank[cell[by_rank].argsort(stable=True)]
    return _Grid(tuple(pieces), part, cell, order.view(num_cells, -1))


def shared(a: Cells, b: Cells) -> Shared:
    """Return what each cell of `a` shares with the one of `b`; one of them may be a single cell."""
    offset = tuple(torch.maximum(x, y) for x, y in zip(a.offset, b.offset, strict=True))
    length = tuple(
        (torch.minimum(xo + xl, yo + yl) - o).clamp(min=0)
        for xo, xl, yo, yl, o in zip(a.offset, a.length, b.offset, b.length, offset, strict=True)
    )
    end = _numel(length)
    begin = torch.zeros_like(end)
    for span in (a.span, b.span):
        if span is not None:
            begin = torch.maximum(begin, _below(offset, length, span[0]))
            end = torch.minimum(end, _below(offset, length, span[1]))
    return Shared(offset, length, begin, torch.maximum(begin, end))


def holders_of(spec: Spec | FlatSpec, ndim: int) -> torch.Tensor:
    """Return the positions of each cell's holders, as `Cells.holders`."""
    return _grid(spec, ndim).holders


def window(shape: tuple[int, ...], shift: tuple[int, ...]) -> Cells:
    """Return a box of `shape` at `shift` as a single cell: a part of a larger tensor."""
    offset = tuple(torch.tensor([o]) for o in shift or (0,))
    length = tuple(torch.tensor([n]) for n in shape or (1,))
    zero = torch.zeros(1, dtype=torch.int64)
    return Cells(offset, length, None, _numel(length), zero, zero.view(1, 1))


def _numel(length: tuple[Column, ...] | list[Column]) -> Column:
    total = length[0]
    for column in length[1:]:
        total = total * column
    return total


def _mixed(
    at: tuple[Column, ...], mesh: ProcessMesh, axes: tuple[int, ...] | list[int]
) -> tuple[Column, int]:
    """The index of each rank along `axes` as one number, and how many there are."""
    index, count = torch.zeros_like(at[0]), 1
    for axis in axes:
        index, count = index * mesh.shape[axis] + at[axis], count * mesh.shape[axis]
    return index, count


def _flat_ranges(spec: FlatSpec, numel: Column, part: Column) -> tuple[Column, Column]:
    """The range of each rank in the elements of its box."""
    begin, end = torch.zeros_like(numel), torch.zeros_like(numel)
    for count in numel.unique().tolist():
        edges = torch.tensor(spec.bounds(count))
        here = numel == count
        begin[here], end[here] = edges[part[here]], edges[part[here] + 1]
    return begin, end


def _point(offset: list[Column], length: list[Column], index: Column) -> tuple[Column, ...]:
    """The coordinates of the row-major element `index` of each box; behind the end too."""
    point: list[Column] = []
    for o, n in zip(reversed(offset[1:]), reversed(length[1:]), strict=True):
        n = n.clamp(min=1)
        point.append(o + index % n)
        index = index // n
    return (offset[0] + index, *reversed(point))


def _below(
    offset: tuple[Column, ...], length: tuple[Column, ...], point: tuple[Column, ...]
) -> Column:
    """How many elements of each box stand before `point` in row-major order."""
    count = torch.zeros_like(point[0])
    inside = torch.ones_like(count, dtype=torch.bool)
    for d, (o, n, p) in enumerate(zip(offset, length, point, strict=True)):
        before = (p - o).clamp(min=0)
        rows = torch.minimum(before, n)
        for other in length[d + 1 :]:
            rows = rows * other
        count = count + rows * inside
        inside = inside & (p >= o) & (before < n)
    return count


@remembered(maxsize=64)
def _coordinates(mesh: ProcessMesh) -> tuple[Column, ...]:
    table = torch.tensor(list(product(*(range(size) for size in mesh.shape))), dtype=torch.int64)
    return tuple(table[:, axis].contiguous() for axis in range(len(mesh.shape)))

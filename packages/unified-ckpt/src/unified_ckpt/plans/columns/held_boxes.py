"""Who holds what, merged over ranks: each distinct box once, with all its holders, and checked.

Equal boxes are replicas; of those with a `replica_id` only the holders of the lowest count. The
boxes of every tensor cover it exactly once, or an error says which one does not.

    held = HeldBoxes.of(BoxTable.of(encoded))
    held.box_start[t], held.box_start[t + 1]  # the boxes of tensor t
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from unified_ckpt.errors import CheckpointValueError
from unified_ckpt.geometry import check_tiling
from unified_ckpt.plans.columns.box_table import NO_REPLICA, BoxTable

_ROWS_AT_ONCE = 16_384
_BOXES_AT_ONCE = 16_384
_MAX_CUT_DIMS = 6  # a box has two to that power corners
_MAX_PLACE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldBoxes:
    """The distinct non-empty boxes of all tensors, by tensor, offset and shape.

    Attributes:
        first_row: row of the table that names each tensor first, `[tensors]`.
        num_bytes: of each tensor, `[tensors]`.
        box_start: where each tensor's boxes begin, and the end of the last, `[tensors + 1]`.
        row: a row of the table that is the box, `[boxes]`.
        box_bytes: `[boxes]`.
        holder_start: number of each box's first holder, `[boxes + 1]`.
        holder: rows of the table that hold the box, by rank, one for each rank, `[holders]`.
    """

    first_row: torch.Tensor
    num_bytes: torch.Tensor
    box_start: torch.Tensor
    row: torch.Tensor
    box_bytes: torch.Tensor
    holder_start: torch.Tensor
    holder: torch.Tensor

    @classmethod
    def of(cls, table: BoxTable) -> "HeldBoxes":
        """Merge the rows of a table.

        Raises:
            CheckpointValueError: ranks disagree about a tensor, boxes overlap, or there is a hole.
        """
        rows = table.tensor.argsort(stable=True).to(torch.int32)
        num_rows = torch.bincount(table.tensor, minlength=len(table.keys))
        first_row = rows[num_rows.cumsum(0) - num_rows]
        itemsize = torch.tensor(table.itemsize_bytes or [0])
        total = torch.empty(len(table.keys), dtype=torch.int64)
        found: list[_Merged] = []
        for slab in rows.split(_slab_sizes(num_rows)):
            tensor = table.tensor[slab]
            first, last, numel = _corners(table, slab, first_row[tensor], total)
            order = _sorted_rows(tensor, first, last, numel)
            size = numel[order] * itemsize[table.dtype[slab[order]].to(torch.int32)]
            found.append(_merge(table, slab[order], first[order], last[order], size))
        del rows, slab
        row = _join([each.row for each in found], torch.int32)
        counts = torch.bincount(table.tensor[row], minlength=len(table.keys))
        held = cls(
            first_row=first_row,
            num_bytes=total * itemsize[table.dtype[first_row].to(torch.int32)],
            box_start=_starts(counts),
            row=row,
            box_bytes=_join([each.num_bytes for each in found], torch.int64),
            holder_start=_starts(_join([each.num_holders for each in found], torch.int32)),
            holder=_join([each.holder for each in found], torch.int32),
        )
        _check_tilings(table, held, is_whole=(counts == 1) & _is_whole(held, counts))
        return held


@dataclass(frozen=True, slots=True)
class _Merged:
    """The boxes of some tensors: a row of each, its bytes, and the rows that hold them."""

    row: torch.Tensor
    num_bytes: torch.Tensor
    num_holders: torch.Tensor
    holder: torch.Tensor


def _slab_sizes(num_rows: torch.Tensor) -> list[int]:
    """Rows of some tensors after the other, so that little memory is needed at once."""
    slab_of = num_rows.cumsum(0) // _ROWS_AT_ONCE
    sizes = torch.zeros(int(slab_of[-1]) + 1 if len(num_rows) else 1, dtype=torch.int64)
    return [size for size in sizes.index_add_(0, slab_of, num_rows).tolist() if size] or [0]


def _merge(
    table: BoxTable,
    rows: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    num_bytes: torch.Tensor,
) -> _Merged:
    """Merge sorted rows of equal boxes: keep those of the lowest replica, one for each rank."""
    new = _changes(table.tensor[rows], first, last)
    box = new.cumsum(0) - 1
    row, sizes = rows[new], num_bytes[new]
    if table.replica is not None:
        replica = table.replica[rows]
        lowest = torch.full((len(row),), NO_REPLICA).scatter_reduce_(0, box, replica, "amin")
        kept = replica == lowest[box]
        rows, box = rows[kept], box[kept]
    kept = _changes(box, table.rank[rows])
    rows, box = rows[kept], box[kept]
    return _Merged(row, sizes, torch.bincount(box, minlength=len(row)).to(torch.int32), rows)


def _join(columns: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *columns])


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])


def _is_whole(held: HeldBoxes, counts: torch.Tensor) -> torch.Tensor:
    """Whether each tensor's first box has as many bytes as the tensor."""
    if not len(held.row):
        return torch.zeros_like(counts, dtype=torch.bool)
    first = held.box_bytes[held.box_start[:-1].clamp(max=len(held.row) - 1)]
    return first == held.num_bytes


def _sorted_rows(
    tensor: torch.Tensor, first: torch.Tensor, last: torch.Tensor, numel: torch.Tensor
) -> torch.Tensor:
    """Rows of boxes that are not empty, by tensor, offset and shape, then as they were."""
    order = numel.nonzero().squeeze(1)
    for column in (last, first, tensor):
        order = order[column[order].argsort(stable=True)]
    return order


def _changes(*columns: torch.Tensor) -> torch.Tensor:
    """Whether each place differs from the one before it in some column."""
    new = torch.ones(len(columns[0]), dtype=torch.bool)
    if len(new):
        new[1:] = torch.stack([c[1:] != c[:-1] for c in columns]).any(0)
    return new


def _corners(
    table: BoxTable, rows: torch.Tensor, same: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's first and last element in its tensor, and their number.

    Elements count row-major, so those two say which box it is.

    Args:
        table: the boxes.
        rows: some of its rows, with all of each tensor.
        same: the first row of each one's tensor.
        total: gets the elements of each of the tensors.
    """
    first, last, numel = (torch.empty(len(rows), dtype=torch.int64) for _ in range(3))
    alike = (table.dtype[rows] == table.dtype[same]) & (
        table.num_dims[rows] == table.num_dims[same]
    )
    for place, numbers in table.by_dims(rows):
        shape, offset, local = numbers.unbind(1)
        inner = torch.ones_like(shape)
        for dim in range(shape.shape[1] - 2, -1, -1):
            inner[:, dim] = inner[:, dim + 1] * shape[:, dim + 1]
        first[place] = (offset * inner).sum(1)
        last[place] = ((offset + local - 1) * inner).sum(1)
        numel[place] = local.prod(1)
        is_first = same[place] == rows[place]
        total[table.tensor[rows[place[is_first]]].to(torch.int64)] = shape[is_first].prod(1)
        comparable = alike[place].nonzero().squeeze(1)
        of_first = table.first_dim[same[place[comparable]]].unsqueeze(1)
        known = table.dims[of_first + torch.arange(shape.shape[1])]
        alike[place[comparable]] = (known == shape[comparable]).all(1)
    if not alike.all():
        number = int((~alike).nonzero()[0])
        _raise_unlike(table, torch.stack([same[number], rows[number].to(torch.int64)]))
    return first, last, numel


def _raise_unlike(table: BoxTable, rows: torch.Tensor) -> None:
    said = [
        f"rank {rank} says {table.dtypes[dtype]} {shape}"
        for rank, dtype, (shape, _, _) in zip(
            table.rank[rows].tolist(), table.dtype[rows].tolist(), table.tuples(rows), strict=True
        )
    ]
    raise CheckpointValueError(f"{_name(table, int(table.tensor[rows[0]]))}: {', '.join(said)}")


def _name(table: BoxTable, tensor: int) -> str:
    return f"{table.parts[int(table.part[tensor])]} {table.keys[tensor]!r}"


def _check_tilings(table: BoxTable, held: HeldBoxes, *, is_whole: torch.Tensor) -> None:
    for tensor in _suspects(table, held, is_whole=is_whole):
        begin, end = held.box_start[tensor : tensor + 2].tolist()
        boxes = [(offset, shape) for _, offset, shape in table.tuples(held.row[begin:end])]
        global_shape = table.tuples(held.first_row[tensor : tensor + 1])[0][0]
        problem = check_tiling(global_shape, boxes)
        if problem is not None:
            raise CheckpointValueError(f"{_name(table, tensor)} {global_shape}: {problem}")


def _suspects(table: BoxTable, held: HeldBoxes, *, is_whole: torch.Tensor) -> Iterator[int]:
    """Yield the tensors whose boxes do not tile them, and those where only `check_tiling` can tell.

    A box is determined by its corners with alternating signs, and sums of boxes by the sums of
    their corners (see `check_tiling`): the corners of a tensor's boxes, and with the opposite sign
    its own, cancel if and only if the boxes tile it. Here for many tensors at once.
    """
    counts = held.box_start.diff()
    yield from ((counts == 0) & (held.num_bytes > 0)).nonzero().squeeze(1).tolist()
    left = ((counts > 0) & ~is_whole).nonzero().squeeze(1)
    dims_of = table.num_dims[held.first_row[left]]
    for dims in dims_of.unique().tolist():
        alike = left[dims_of == dims]
        batch = counts[alike].cumsum(0) // _BOXES_AT_ONCE
        for number in batch.unique().tolist():
            yield from _untiled(table, held, alike[batch == number])


def _untiled(table: BoxTable, held: HeldBoxes, tensors: torch.Tensor) -> list[int]:
    """Return which of some tensors of equally many dims fail, or cannot be told from here."""
    counts = held.box_start.diff()[tensors]
    owner = torch.arange(len(tensors)).repeat_interleave(counts)
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    rows = held.row[held.box_start[tensors][owner] + within]
    numbers = torch.empty((len(rows), 3, int(table.num_dims[rows[0]])), dtype=torch.int64)
    for place, some in table.by_dims(rows):
        numbers[place] = some
    shape, offset, local = numbers.unbind(1)
    cut = (shape != local).any(0).nonzero().squeeze(1)
    whole = shape[(counts.cumsum(0) - counts)][:, cut] + 1  # of each tensor, its corners included
    if len(cut) > _MAX_CUT_DIMS or whole.double().prod(1).sum() > _MAX_PLACE:
        found: list[int] = tensors.tolist()
        return found
    steps = whole.flip(1).cumprod(1).flip(1)
    sizes = steps[:, 0] if len(cut) else torch.ones(len(tensors), dtype=torch.int64)
    base = sizes.cumsum(0) - sizes
    inner = torch.cat([steps[:, 1:], torch.ones((len(tensors), 1), dtype=torch.int64)], 1)
    owner = torch.cat([owner, torch.arange(len(tensors))])
    begin = torch.cat([offset[:, cut], torch.zeros_like(whole)])
    length = torch.cat([local[:, cut], whole - 1])
    sign = torch.ones(len(owner), dtype=torch.int64)
    sign[len(rows) :] = -1
    places, signs = [], []
    for corner in itertools.product((0, 1), repeat=len(cut)):
        at = begin + length * torch.tensor(corner, dtype=torch.int64)
        places.append(base[owner] + (at * inner[owner, : len(cut)]).sum(1))
        signs.append(sign * (-1) ** sum(corner))
    place, number = torch.cat(places).unique(return_inverse=True)
    total = torch.zeros(len(place), dtype=torch.int64).index_add_(0, number, torch.cat(signs))
    bad = torch.searchsorted(base, place[total != 0], right=True) - 1
    failing: list[int] = tensors[bad.unique()].tolist()
    return failing

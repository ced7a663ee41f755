"""Ranges of boxes as views of a rank's local tensor: how messages are read and written in place.

Elements `begin` to `end` of a box, in row-major order, are the end of a row, whole rows, and the
start of another: at most 2 * dims - 1 boxes.

    range_boxes((4, 6), 5, 20)   # [((0, 5), (1, 1)), ((1, 0), (2, 6)), ((3, 0), (1, 2))]
"""

import math
import operator
from collections.abc import Iterator

import torch

from mesh_spmd.layout import FlatSpec, TensorSpec
from mesh_spmd.reshard.messages import Piece
from mesh_spmd.reshard.turns import AddendBox

Sizes = tuple[int, ...]


def range_boxes(shape: Sizes, begin: int, end: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield the boxes, as (offset, shape), whose elements in order are the range; none is empty."""
    if begin >= end:
        return
    inner = math.prod(shape[1:])
    if len(shape) == 1 or (begin % inner == 0 and end % inner == 0):
        first, last = begin // inner, end // inner
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        return
    row = begin // inner
    row_end = min(end, (row + 1) * inner)
    if begin % inner or row_end == end:
        for offset, part in range_boxes(shape[1:], begin - row * inner, row_end - row * inner):
            yield (row, *offset), (1, *part)
        yield from range_boxes(shape, row_end, end)
        return
    whole = end // inner * inner
    yield from range_boxes(shape, begin, whole)
    yield from range_boxes(shape, whole, end)


def region_views(
    local: torch.Tensor, tensor: TensorSpec, rank: int, piece: Piece | AddendBox, shift: Sizes
) -> list[torch.Tensor]:
    """Return views of `rank`'s local tensor whose elements, in order, are those of the piece.

    Args:
        local: of `tensor.local_shape(rank)`, any strides.
        tensor: what it is a part of.
        rank: the rank that holds it.
        piece: a box and a range of its elements, in coordinates in which the tensor begins at
            `shift`.
        shift: zeros, unless the tensor is a box of a larger one.
    """
    box = tensor.box(rank)
    starts = [o - s - b for o, s, b in zip(piece.offset, shift, box.offset, strict=False)]
    if not tensor.shape:
        return [local.view(1)] if piece.end > piece.begin else []
    parts = range_boxes(piece.shape, piece.begin, piece.end)
    places = [([s + o for s, o in zip(starts, offset, strict=True)], n) for offset, n in parts]
    if isinstance(tensor.spec, FlatSpec):
        begin, _ = tensor.flat_range(rank)
        step = local.stride(0)
        strides = [math.prod(box.shape[d + 1 :]) * step for d in range(len(box.shape))]
        base = local.storage_offset() - begin * step
        return [
            local.as_strided(n, strides, base + sum(map(operator.mul, at, strides)))
            for at, n in places
        ]
    return [local[tuple(slice(a, a + m) for a, m in zip(at, n, strict=True))] for at, n in places]

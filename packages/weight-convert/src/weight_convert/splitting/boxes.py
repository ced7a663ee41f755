"""A tensor cut along dims, and cut tensors joined, as byte ranges or rows that are woven.

    part = cut_out(tensor, cuts, places, work)
    whole = put_together(key, parts, cut, work)

Long runs become ranges, which the kernel copies; short ones, as of a matrix that is cut along its
columns, would be millions of ranges, and become one `Weave`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weight_convert.cutting import DimCut
from weight_convert.files import tensor_size_bytes
from weight_convert.outputs import Computations, PlannedTensor, Weave

_LONG_RUN_BYTES = 16 << 10


def cut_out(
    tensor: PlannedTensor,
    cuts: Sequence[DimCut],
    places: Mapping[str, int],
    work: Computations,
) -> PlannedTensor:
    """The part of a tensor that the rank at `places` holds."""
    for cut in sorted(cuts, key=lambda cut: cut.dim):
        tensor = _cut_dim(tensor, cut, places[cut.axis], work)
    return tensor


def _cut_dim(tensor: PlannedTensor, cut: DimCut, place: int, work: Computations) -> PlannedTensor:
    dim, end = cut.dim, tensor.shape[cut.dim]
    shape = (*tensor.shape[:dim], cut.length(place), *tensor.shape[dim + 1 :])
    there = [(b, min(b + n, end) - b) for b, n in cut.ranges[place] if min(b + n, end) > b]
    if there == [(0, end)] and shape == tensor.shape:
        return tensor
    rows, unit = _rows_and_unit(tensor.dtype, tensor.shape, dim)
    runs = [
        Weave.Run(input=0, offset_bytes=b * unit, stride_bytes=end * unit, size_bytes=n * unit)
        for b, n in there
    ]
    lacking = cut.length(place) - sum(n for _, n in there)
    return _woven((tensor,), rows, runs, lacking * unit, replace(tensor, shape=shape), work)


def put_together(
    whole: PlannedTensor, parts: Sequence[PlannedTensor], cut: DimCut, work: Computations
) -> PlannedTensor:
    """The tensor whose parts, one for each place on the cut's axis, are given.

    Args:
        whole: its key, dtype, shape and order; its pieces do not count.
        parts: for each place.
        cut: how it was cut; padding is left out, and of several copies the first is taken.
        work: of the plan.
    """
    dim, end = cut.dim, whole.shape[cut.dim]
    rows, unit = _rows_and_unit(whole.dtype, whole.shape, dim)
    found = []
    for place, ranges in enumerate(cut.ranges):
        inside = 0
        for begin, length in ranges:
            found.append((begin, min(begin + length, end) - begin, place, inside))
            inside += length
    runs, covered = [], 0
    for begin, length, place, inside in sorted(found):
        if begin == covered and length > 0:
            runs.append(
                Weave.Run(
                    input=place,
                    offset_bytes=inside * unit,
                    stride_bytes=cut.length(place) * unit,
                    size_bytes=length * unit,
                )
            )
            covered += length
    return _woven(parts, rows, runs, 0, whole, work)


def _rows_and_unit(dtype: str, shape: Sequence[int], dim: int) -> tuple[int, int]:
    """How many rows a tensor has before `dim`, and the bytes of one step along it."""
    return math.prod(shape[:dim]), tensor_size_bytes(dtype, (math.prod(shape[dim + 1 :]),))


def _woven(
    inputs: Sequence[PlannedTensor],
    rows: int,
    runs: Sequence[Weave.Run],
    zero_bytes: int,
    like: PlannedTensor,
    work: Computations,
) -> PlannedTensor:
    """The tensor made of these rows, with the key, dtype, shape and order of `like`."""
    is_long = rows == 1 or min((run.size_bytes for run in runs), default=0) >= _LONG_RUN_BYTES
    if not zero_bytes and (is_long or not runs):
        pieces = [
            piece
            for row in range(rows)
            for run in runs
            for piece in inputs[run.input].cut(
                run.offset_bytes + row * run.stride_bytes, run.size_bytes
            )
        ]
        return like.made_of(pieces)
    return work.add(
        Weave(num_rows=rows if runs else 0, runs=tuple(runs), zero_bytes=zero_bytes),
        inputs,
        key=like.key,
        dtype=like.dtype,
        shape=like.shape,
        order=like.order,
    )

"""Casts and transposes.

    for chunk in cast(Cast(), (source,), torch.float32, (8,)): ...

A transposed matrix is made a band of its rows at a time. Every band reads the whole source in
rows, since single elements of each row would be a system call each: what does not fit is read
more often, never held.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from weight_convert.compute.reading import TensorReader
from weight_convert.errors import WeightConvertError
from weight_convert.operations import Operation, Transpose

CHUNK_ELEMENTS = Operation.CHUNK_ELEMENTS
_BAND_BYTES = 24 << 20
_BAND_BYTES_EACH = 24  # for each element of a chunk, where memory is limited
_PART_BYTES = 512  # of a row, from which on a part of it is read alone
_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of chunks of `count` things."""
    for begin in range(0, count, step):
        yield begin, min(step, count - begin)


def cast(
    _: Operation,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """The elements of one input in another dtype."""
    (source,) = inputs
    for begin, length in ranges(prod(shape), min(CHUNK_ELEMENTS, most)):
        yield rounded(source.read(begin, length), dtype, source.key)


def rounded(values: torch.Tensor, dtype: torch.dtype, key: str) -> torch.Tensor:
    """`values` in `dtype`.

    Raises:
        WeightConvertError: a number is too large for `dtype`, which is fp8 or float16, or another
            whose values are float64.
    """
    result = values.to(dtype)
    double = values.dtype == torch.float64
    if (dtype in _NARROW or double) and not torch.equal(
        result.to(torch.float32 if dtype in _NARROW else dtype).isfinite(),
        values.to(torch.float64 if double else torch.float32).isfinite(),
    ):
        largest = values.to(torch.float64).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        wide = largest > torch.finfo(torch.float32).max
        remedy = "leave its dtype" if wide else "choose one with a wider range, such as bfloat16"
        raise WeightConvertError(
            f"{key} holds {largest:g}, too large for {str(dtype).removeprefix('torch.')}; {remedy}"
        )
    return result


def transpose(
    operation: Transpose,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """One input with its last two dims exchanged, or some rows of that."""
    (source,) = inputs
    *outer, width, rows = shape
    first, columns = operation.first_row, source.num_columns
    reads_parts = width < columns and width * source.dtype.itemsize >= _PART_BYTES

    def source_rows(begin: int, count: int) -> torch.Tensor:
        if reads_parts:
            starts = (row * columns + first for row in range(begin, begin + count))
            block = torch.cat([source.read(start, width) for start in starts]).view(count, width)
        else:
            block = source.read(begin * columns, count * columns).view(count, columns)
            block = block[:, first : first + width]
        return rounded(block, dtype, source.key)

    yield from transposed_bands(source_rows, (prod(outer), rows, width), dtype, most)


def transposed_bands(
    rows_of: Callable[[int, int], torch.Tensor],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    most: int,
    widest: int | None = None,
) -> Iterator[torch.Tensor]:
    """Bands [some columns, rows] of matrices [rows, columns] that are transposed.

    Args:
        rows_of: gives `count` whole rows from `begin` on, counted over all matrices.
        shape: matrices, rows and columns.
        dtype: of the rows.
        most: limit on the elements of a block of whole rows.
        widest: limit on the columns of a band; None for what memory allows.
    """
    matrices, rows, columns = shape
    band_bytes = min(_BAND_BYTES, most * _BAND_BYTES_EACH)
    width = max(1, band_bytes // max(1, rows * dtype.itemsize))
    width = width if widest is None else min(width, widest)
    height = max(1, min(CHUNK_ELEMENTS, most) // max(1, columns))
    memory = torch.empty(min(width, columns) * rows, dtype=dtype)  # of all bands, one at a time
    for matrix in range(matrices):
        for left, length in ranges(columns, width):
            band = memory[: length * rows].view(length, rows)
            for top, count in ranges(rows, height):
                block = rows_of(matrix * rows + top, count)
                band[:, top : top + count] = block[:, left : left + length].t()
            yield band

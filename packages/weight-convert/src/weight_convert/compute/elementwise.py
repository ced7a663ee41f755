"""Casts and transposes.

    for chunk in cast(Cast(), (source,), torch.float32, (8,)): ...

A transposed matrix is made a band of its rows at a time. Every band reads the whole source in
rows, since single elements of each row would be a system call each: what does not fit is read
more often, never held.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from weight_convert.compute.reading import TensorReader
from weight_convert.errors import WeightConvertError
from weight_convert.operations import Operation

CHUNK_ELEMENTS = 1 << 20
_BAND_BYTES = 24 << 20
_NARROW = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(begin, length) of chunks of `count` things."""
    for begin in range(0, count, step):
        yield begin, min(step, count - begin)


def cast(
    _: Operation, inputs: Sequence[TensorReader], dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """The elements of one input in another dtype."""
    (source,) = inputs
    for begin, length in ranges(prod(shape), CHUNK_ELEMENTS):
        yield rounded(source.read(begin, length), dtype, source.key)


def rounded(values: torch.Tensor, dtype: torch.dtype, key: str) -> torch.Tensor:
    """`values` in `dtype`.

    Raises:
        WeightConvertError: a number is too large for a narrow dtype.
    """
    result = values.to(dtype)
    if dtype in _NARROW and not torch.equal(
        result.to(torch.float32).isfinite(), values.to(torch.float32).isfinite()
    ):
        largest = values.to(torch.float32).abs().nan_to_num(0.0, 0.0).max().item()
        raise WeightConvertError(
            f"{key} holds {largest:g}, too large for {str(dtype).removeprefix('torch.')}; "
            f"choose a dtype with a wider range, such as bfloat16"
        )
    return result


def transpose(
    _: Operation, inputs: Sequence[TensorReader], dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """One input with its last two dims exchanged."""
    (source,) = inputs
    *outer, columns, rows = shape
    width = max(1, _BAND_BYTES // max(1, rows * dtype.itemsize))
    height = max(1, CHUNK_ELEMENTS // max(1, columns))
    for matrix in range(prod(outer)):
        for left, band_columns in ranges(columns, width):
            band = torch.empty(band_columns, rows, dtype=dtype)
            for top, length in ranges(rows, height):
                block = source.read((matrix * rows + top) * columns, length * columns)
                part = block.view(length, columns)[:, left : left + band_columns]
                band[:, top : top + length] = rounded(part, dtype, source.key).t()
            yield band

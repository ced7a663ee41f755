"""Weights to blocks of fp8 and back, a band of rows at a time.

    for chunk in from_blocks(FromBlocks(block=(128, 128)), (codes, scales), torch.bfloat16, shape):

Invariant: a code that is decoded and encoded again by the same scale is the same byte, also NaN, -0
and subnormal ones, wherever the scale keeps the weights inside the dtype's normal numbers. Fresh
scales and codes are those that transformers makes; its blocks must fill the matrix, ours need not.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from weight_convert.compute.elementwise import CHUNK_ELEMENTS
from weight_convert.compute.reading import TensorReader
from weight_convert.errors import WeightConvertError
from weight_convert.operations import FromBlocks, ToBlocks

_LARGEST = 448.0
_NAN_CODE = 0x7F
_LARGEST_FACTOR = torch.finfo(torch.float32).max


def from_blocks(
    operation: FromBlocks,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """Codes x scales."""
    codes, scales = inputs
    rows_of_scales = _rows_of_scales(scales, operation.block[1], shape)
    for block_row, begin, count in _bands(shape, operation.block[0], most):
        band = codes.read(begin * shape[-1], count * shape[-1]).view(count, shape[-1])
        yield decoded(band, rows_of_scales[block_row], dtype)


def to_blocks(
    operation: ToBlocks,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """Codes or scales of a weight.

    Raises:
        WeightConvertError: a weight is not finite where nothing else could stand.
    """
    weight, *given = inputs
    block = operation.block
    if operation.part == "scales":
        for block_row in range(prod(shape[:-1])):
            largest = _largest(weight, block, block_row, most)
            yield _finite(_LARGEST / largest).reciprocal()
        return
    columns = shape[-1]
    rows = _rows_of_scales(given[0], block[1], shape) if given else None
    current, factors = -1, torch.empty(0)
    for block_row, begin, count in _bands(shape, block[0], most):
        band = weight.read(begin * columns, count * columns).view(count, columns)
        if rows is not None:
            former = [codes.read(begin * columns, count * columns) for codes in given[1:]]
            yield _by_given(band, rows[block_row], former, weight.key).view(dtype)
            continue
        if block_row != current:
            current = block_row
            factors = _spread(
                _LARGEST / _largest(weight, block, block_row, most), block[1], columns
            )
        yield encoded(band, factors).view(dtype)


def _by_given(
    band: torch.Tensor, scales: torch.Tensor, former: Sequence[torch.Tensor], key: str
) -> torch.Tensor:
    """Bytes of codes by scales that are kept; `former` codes stand where they decode to `band`."""
    result = encoded(band, scales.reciprocal())
    lost = band.isinf()
    for codes in former:
        same = _bits(decoded(codes.view(band.shape), scales, band.dtype)) == _bits(band)
        result = torch.where(same, codes.view(band.shape).view(torch.uint8), result)
        lost &= ~same
    _check_finite(not lost.any(), key)
    return result


def _check_finite(is_finite: bool, key: str) -> None:
    if not is_finite:
        raise WeightConvertError(f"{key} holds infinite or undefined numbers, which fp8 has not")


def decoded(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes x scales in `dtype`; a NaN keeps the sign of its code."""
    values = (codes.to(torch.float32) * scales).to(dtype)
    code_bits = codes.view(torch.uint8)
    nan = (code_bits & _NAN_CODE) == _NAN_CODE
    if nan.any():
        sign = torch.where(code_bits > _NAN_CODE, -1.0, 1.0).to(dtype)
        values = torch.where(nan, torch.full_like(values, float("nan")).copysign(sign), values)
    return values


def encoded(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Bytes of the nearest codes of weight x factors."""
    values = weight.to(torch.float32) * _finite(factors)
    codes = values.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = values.isnan()
    if nan.any():
        signed = weight.to(torch.float32).signbit().to(torch.uint8) * 0x80 + _NAN_CODE
        codes = torch.where(nan, signed, codes)
    return codes


def _finite(factors: torch.Tensor) -> torch.Tensor:
    """Factors that leave 0 at 0: an infinite one, of numbers below 2 ** -119, would make it NaN."""
    return factors.clamp(-_LARGEST_FACTOR, _LARGEST_FACTOR)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)


def _bands(shape: Sequence[int], height: int, limit: int) -> Iterator[tuple[int, int, int]]:
    """(number of the row of blocks, first row, rows) of parts of rows of blocks."""
    *outer, rows, columns = shape
    most = max(1, min(CHUNK_ELEMENTS, limit) // max(1, columns))
    number = 0
    for matrix in range(prod(outer)):
        for top in range(0, rows, height):
            bottom = min(top + height, rows)
            for begin in range(top, bottom, most):
                yield number, matrix * rows + begin, min(most, bottom - begin)
            number += 1


def _rows_of_scales(scales: TensorReader, width: int, shape: Sequence[int]) -> "_Rows":
    return _Rows(scales.whole(), width, shape[-1])


class _Rows:
    """Scales of rows of blocks, one for each column."""

    def __init__(self, scales: torch.Tensor, width: int, columns: int) -> None:
        self._scales = scales.reshape(-1, scales.shape[-1])
        self._width, self._columns = width, columns

    def __getitem__(self, number: int) -> torch.Tensor:
        return _spread(self._scales[number].to(torch.float32), self._width, self._columns)


def _spread(values: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    return values.repeat_interleave(width)[:columns]


def _largest(
    weight: TensorReader, block: tuple[int, int], block_row: int, limit: int
) -> torch.Tensor:
    """The largest magnitude of each block of a row of blocks; 448 where all is 0."""
    *_, rows, columns = weight.shape
    height, width = block
    per_matrix = -(-rows // height)
    matrix, row = divmod(block_row, per_matrix)
    top, bottom = row * height, min((row + 1) * height, rows)
    groups = -(-columns // width)
    result = torch.zeros(groups)
    most = max(1, min(CHUNK_ELEMENTS, limit) // max(1, columns))
    for begin in range(top, bottom, most):
        count = min(most, bottom - begin)
        band = weight.read((matrix * rows + begin) * columns, count * columns)
        values = band.view(count, columns).to(torch.float32).abs().amax(0)
        padded = torch.nn.functional.pad(values, (0, groups * width - columns))
        result = torch.maximum(result, padded.view(groups, width).amax(1))
    _check_finite(bool(result.isfinite().all()), weight.key)
    return torch.where(result > 0, result, torch.full_like(result, _LARGEST))

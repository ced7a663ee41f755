"""Weights to mxfp4 and back, in the layout of GPT-OSS.

    for chunk in from_mx(FromMx(), (blocks, scales), torch.bfloat16, (experts, columns, rows)):

A stored row is a column of the weight, so either side is made in bands of the other's rows.

Invariant: a code that is decoded and encoded again by the same scale is the same code.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from weight_convert.compute.elementwise import CHUNK_ELEMENTS, transposed_bands
from weight_convert.compute.reading import TensorReader
from weight_convert.errors import WeightConvertError
from weight_convert.operations import Operation, ToMx

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
# Between two neighbours the even code is nearer at a tie: bounds of codes 0|1, 1|2, ...
_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_BIAS = 127
_LARGEST_EXPONENT = 2  # of 6.0


def from_mx(
    _: Operation,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """Blocks x scales, transposed."""
    blocks, scales = inputs
    *outer, columns, rows = shape
    groups = columns // GROUP

    def stored_rows(begin: int, count: int) -> torch.Tensor:
        codes = blocks.read(begin * columns // 2, count * columns // 2)
        exponents = scales.read(begin * groups, count * groups)
        return decoded(codes.view(-1, GROUP // 2), exponents).view(count, columns).to(dtype)

    yield from transposed_bands(stored_rows, (prod(outer), rows, columns), dtype, most)


def to_mx(
    operation: ToMx,
    inputs: Sequence[TensorReader],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    most: int,
) -> Iterator[torch.Tensor]:
    """Blocks or scales of a weight [..., columns, rows].

    Raises:
        WeightConvertError: a weight is not finite where nothing else could stand.
    """
    weight, *given = inputs
    done = 0
    for band in _bands(weight, most):
        values = band.reshape(-1, GROUP).to(torch.float32)
        exponents = given[0].read(done, len(values)) if given else exponents_of(values)
        lost = ~values.isfinite()
        codes = encoded(values, exponents)
        if len(given) > 1:
            former = given[1].read(done * GROUP // 2, codes.numel()).view(codes.shape)
            again = decoded(former, exponents).to(band.dtype).to(torch.float32)
            same = again.view(torch.int32) == values.view(torch.int32)
            pairs = same[:, 0::2] & same[:, 1::2]
            codes, lost = torch.where(pairs, former, codes), lost & ~same
        if lost.any():
            raise WeightConvertError(f"{weight.key} holds numbers that mxfp4 has not: inf or NaN")
        done += len(values)
        yield (exponents if operation.part == "scales" else codes).view(dtype)


def decoded(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Values [blocks, 32] of packed codes [blocks, 16]; the low half of a byte is the first."""
    pairs = torch.stack([_CODES[(codes & 15).long()], _CODES[(codes >> 4).long()]], dim=-1)
    return torch.ldexp(pairs.view(-1, GROUP), exponents.to(torch.int32)[:, None] - _BIAS)


def encoded(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Packed nearest codes of values [blocks, 32]; what is too large becomes 6."""
    scaled = torch.ldexp(values.to(torch.float64), _BIAS - exponents.to(torch.int32)[:, None])
    size = scaled.abs().to(torch.float32)
    nearest = torch.bucketize(size, _BOUNDS)  # a tie goes to the lower code
    tie = (nearest < len(_BOUNDS)) & (nearest % 2 == 1) & (size == _BOUNDS[nearest.clamp(max=6)])
    codes = (nearest + tie).to(torch.uint8) + values.signbit().to(torch.uint8) * 8
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def exponents_of(values: torch.Tensor) -> torch.Tensor:
    """The shared exponent of each block: that of its largest value, less that of 6."""
    largest = values.abs().amax(1)
    _, exponents = torch.frexp(largest)
    shared = exponents - 1 - _LARGEST_EXPONENT + _BIAS
    return torch.where(largest > 0, shared.clamp(0, 254), 0).to(torch.uint8)


def _bands(weight: TensorReader, most: int) -> Iterator[torch.Tensor]:
    """Bands of the transposed weight."""
    *outer, columns, rows = weight.shape

    def weight_rows(begin: int, count: int) -> torch.Tensor:
        return weight.read(begin * rows, count * rows).view(count, rows)

    step = max(1, min(CHUNK_ELEMENTS, most) // max(1, columns))
    yield from transposed_bands(weight_rows, (prod(outer), columns, rows), weight.dtype, most, step)

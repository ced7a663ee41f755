"""Known values: an element's number in the whole tensor, digit by digit, so that no two are alike.

A bfloat16 holds 256 whole numbers exactly, so that numbers of elements would be alike from there
on, and a wrong neighbour would not be seen. So the tensor is moved once for each digit of them.
"""

from __future__ import annotations

import math

import torch

from mesh_spmd.creation import arange
from mesh_spmd.layout import TensorSpec


def num_digits(tensor: TensorSpec) -> int:
    """Return how many digits tell all elements from each other."""
    base, digits = _base(tensor.dtype), 1
    while base**digits < tensor.numel:
        digits += 1
    return digits


def known_part(
    tensor: TensorSpec, rank: int, digit: int, *, device: torch.device, start: int = 0
) -> torch.Tensor:
    """Return what `rank` holds of the tensor of digits: its part, its addends, or nothing.

    Of a partial sum one rank holds more than the rest together, which is not always the first one.

    Args:
        tensor: whose elements are numbered from `start` on.
        rank: also one outside the mesh, which holds an empty tensor.
        digit: which digit of the numbers; 0 is the lowest.
        device: where it is made.
        start: the number of the first element, of a part of a larger tensor.
    """
    if tensor.mesh.position(rank) is None:
        return torch.empty(0, dtype=tensor.dtype, device=device)
    whole = tensor.reduced()
    numbered = TensorSpec(whole.shape, torch.int64, whole.spec)
    numbers = arange(numbered, rank, device=device) + start
    base = _base(tensor.dtype)
    values = numbers // base**digit % base
    if tensor.partials:
        addends, mine = _addend_of(tensor, rank)
        # Sums of bool are either-or; all others have to take away what the rest adds.
        rest = 0 if tensor.dtype == torch.bool else 1
        is_main = numbers % addends == mine
        values = torch.where(is_main, values - rest * (addends - 1), rest)
    found: torch.Tensor = values.to(tensor.dtype)
    return found


def difference(
    got: torch.Tensor, expected: torch.Tensor, tensor: TensorSpec, rank: int, what: str
) -> list[str]:
    """Return a line on where a rank's part is not, bit for bit, what it must be; else nothing."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return [
            f"rank {rank}, {what}: got {got.dtype} of shape {tuple(got.shape)}, "
            f"expected {expected.dtype} of shape {tuple(expected.shape)}"
        ]
    wrong = (_bits(got) != _bits(expected)).any(1).nonzero().flatten().tolist()
    if not wrong:
        return []
    first = wrong[0]
    here, there = (t.detach().cpu().flatten()[first].item() for t in (got, expected))
    return [
        f"rank {rank}, {what}: element {_index(first, tuple(got.shape))} of its part, "
        f"{_whole_index(first, tensor, rank)} of the whole: got {here}, expected {there}; "
        f"{len(wrong):,} of {got.numel():,} elements differ"
    ]


def _base(dtype: torch.dtype) -> int:
    """How many whole numbers from 0 on the dtype tells apart; a power of two below 2**62."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point or dtype.is_complex:
        return min(2**53, int(2 / torch.finfo(dtype).eps))
    return min(2**62, torch.iinfo(dtype).max // 2 + 1)


def _addend_of(tensor: TensorSpec, rank: int) -> tuple[int, int]:
    """How many addends the elements of a partial tensor have, and which of them `rank` holds."""
    at, count, mine = tensor.mesh.coordinate(rank), 1, 0
    for axis in tensor.partials:
        size = tensor.mesh.axis_size(axis)
        count, mine = count * size, mine * size + at[axis]
    return count, mine


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, a row for each."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).view(flat.numel(), flat.dtype.itemsize)


def _whole_index(number: int, tensor: TensorSpec, rank: int) -> tuple[int, ...]:
    """Where the element with this number of a rank's part stands in the whole tensor."""
    box, (begin, _) = tensor.box(rank), tensor.flat_range(rank)
    inside = _index(begin + number, box.shape)
    return tuple(o + i for o, i in zip(box.offset, inside, strict=True))


def _index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return tuple(number // s % n for s, n in zip(strides, shape, strict=True))

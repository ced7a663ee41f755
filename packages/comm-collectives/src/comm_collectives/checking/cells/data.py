"""Known values for the correctness matrix, and tensors laid out in memory in every awkward way.

An element's value follows from the rank that made it and from its place, so data that arrives in
the wrong place is wrong data. What lies around a view is looked at again afterwards.

    placed = place(moving_rows(torch.int16, index, src=1), "strided")
    placed.problem()                   # "" if neither the view nor its surroundings changed
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch

from comm_collectives.base import DTYPES, as_bytes, dense, from_bytes, num_bytes

SCALAR = "no dims"
_SMALL_FLOATS = tuple(d for d in DTYPES if "float8" in str(d) or "float4" in str(d))
_GAP = 251  # what lies between the elements of a strided view
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor in memory, and a check that it and its surroundings are as they were."""

    view: torch.Tensor
    problem: Callable[[], str]


def index_of(shape: str, *, rows: int, columns: int) -> torch.Tensor:
    """Return the number of each element, int64 [rows, columns]; equal numbers share memory."""
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    if shape == SCALAR:
        return torch.tensor(1)
    if shape == "expanded":
        return j.expand(rows, columns)
    return i + j if shape == "overlapping" else i * columns + j


def moving_rows(dtype: torch.dtype, index: torch.Tensor, *, src: int) -> torch.Tensor:
    """Return values of rank `src` for data that is only moved: arbitrary bits, a bool 0 or 1."""
    number = index.unsqueeze(-1) * dtype.itemsize + torch.arange(dtype.itemsize)
    values = 5 * number + 31 * src + number // 50
    limit = 2 if dtype == torch.bool else 251
    return from_bytes((values % limit).to(torch.uint8).view(-1), dtype, index.shape)


def is_defined(dtype: torch.dtype, op: str) -> bool:
    """Whether an op has a meaning for a dtype."""
    if dtype in _SMALL_FLOATS:
        return False
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype == torch.bool:
        return op in ("min", "max", "product")
    if dtype.is_complex:
        return op in ("sum", "avg", "product")
    return op != "avg" or dtype.is_floating_point


def reduced_rows(
    dtype: torch.dtype, op: str, index: torch.Tensor, size: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the values of each rank for a reduction, and its result; both exact in any dtype.

    Integers use the topmost bits, so that sums wrap around and order needs the sign; the extremes
    of floating dtypes meet a NaN of rank 0.
    """
    numbers = torch.stack([_numbers(dtype, op, index, rank, size) for rank in range(size)])
    if op in ("sum", "avg"):
        result = numbers.sum(0) // size if op == "avg" and not dtype.is_complex else numbers.sum(0)
        result = result / size if op == "avg" and dtype.is_complex else result
    elif op == "product":
        result = numbers.prod(0)
    elif op in BITWISE:
        result = reduce(BITWISE[op], numbers)
    else:
        result = numbers.amin(0) if op == "min" else numbers.amax(0)
    values = [_encode(row, dtype, op) for row in numbers]
    want = _encode(result, dtype, op)
    if dtype.is_floating_point and op in ("min", "max") and len(want.shape) and want.numel():
        for x in (values[0], want):
            x[0, 0] = torch.nan
    return values, want


def place(x: torch.Tensor, shape: str) -> Placed:
    """Lay values out as the shape says: with gaps, rows that share memory, or plainly."""
    if shape == "expanded":
        memory = _copy(x[:1])
        view = memory.expand(x.shape)
    elif shape == "overlapping":
        rows, columns = x.shape
        memory = torch.cat([as_bytes(dense(x[:, 0])), as_bytes(dense(x[-1, 1:]))]).view(x.dtype)
        view = memory.as_strided((rows, columns), (1, 1))
    elif shape == "strided":
        memory, view = _with_gaps(x)
    else:
        memory = view = _copy(x)
    before = _copy(memory)
    return Placed(view=view, problem=lambda: difference(memory, before, "the memory of the input"))


def place_result(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Placed:
    """Lay out room for a result; its check looks only at what lies around it."""
    empty = from_bytes(torch.zeros(num_bytes(dtype, shape), dtype=torch.uint8), dtype, shape)
    if layout != "strided":
        return Placed(view=empty, problem=lambda: "")
    memory, view = _with_gaps(empty)
    before = memory.clone()

    def problem() -> str:
        width = view.shape[1] * dtype.itemsize
        around = memory.clone()
        around[::3, :width] = before[::3, :width]
        return difference(around, before, "the memory around the result")

    return Placed(view=view, problem=problem)


def difference(got: torch.Tensor, want: torch.Tensor, what: str = "the result") -> str:
    """Return what is wrong with `got`, or "". Bits count, but one NaN is as good as another."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{what} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    if got.device.type != want.device.type:
        return f"{what} is on {got.device}, not on {want.device}"
    if torch.equal(as_bytes(dense(got)), as_bytes(dense(want))):
        return ""
    if got.is_floating_point() and got.dtype not in _SMALL_FLOATS:
        plain = [as_bytes(dense(x.masked_fill(x.isnan(), 7.5))) for x in (got, want)]
        if torch.equal(*plain) and torch.equal(got.isnan(), want.isnan()):
            return ""
    return f"{what} holds other values than it should"


def _numbers(
    dtype: torch.dtype, op: str, index: torch.Tensor, rank: int, size: int
) -> torch.Tensor:
    small = (3 * index + 5 * rank + index // 7) % 8
    if dtype == torch.bool:
        return small % 2
    if op == "product":
        small = small % 2 + 1
        return torch.complex(small.double(), 1.0 - small.double()) if dtype.is_complex else small
    if op == "avg":
        small = small * size
    if dtype.is_complex:
        return torch.complex(small.double(), (7.0 - 2 * small.double()) * size)
    return small if _is_unsigned(dtype) else small - 4


def _encode(numbers: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    if dtype == torch.complex32:
        # By way of pairs, because torch warns when it allocates complex32.
        return torch.view_as_complex(torch.view_as_real(numbers).half())
    if dtype.is_complex or dtype.is_floating_point or dtype == torch.bool:
        return numbers.to(dtype)
    if op != "product":
        numbers = numbers << (8 * dtype.itemsize - 3)
    # Whatever lies above the dtype's bits is cut off, which a conversion need not do.
    flat = as_bytes(dense(numbers)).view(*numbers.shape, 8)[..., : dtype.itemsize]
    return from_bytes(dense(flat).view(-1), dtype, numbers.shape)


def _is_unsigned(dtype: torch.dtype) -> bool:
    return not (dtype.is_signed or dtype.is_floating_point or dtype.is_complex)


def _copy(x: torch.Tensor) -> torch.Tensor:
    # As bytes, because torch warns when it allocates complex32.
    return from_bytes(as_bytes(dense(x)).clone(), x.dtype, x.shape)


def _with_gaps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory as bytes [3 * rows, 2 * row bytes], and a view in it that holds `x`."""
    rows, columns = x.shape
    width = columns * x.dtype.itemsize
    memory = torch.full((3 * rows, 2 * width), 1 if x.dtype == torch.bool else _GAP).to(torch.uint8)
    memory[::3, :width] = as_bytes(dense(x)).view(rows, width)
    return memory, memory.view(x.dtype)[::3, :columns]

"""What the reductions compute: for which dtypes an op is defined, and the op itself on one rank.

A backend has few dtypes, and its maximum may lose a NaN (gloo's does, depending on the rank that
has it). So an op goes to the backend only where the backend gives the right bits, if need be in a
wider dtype; everything else is reduced here, in the order of the ranks.

    check_op(torch.uint16, "max")
    total = reduce_rows(rows, "sum")             # [ranks, ...] -> [...]
    factors = gradient_factors(rows, "product")  # what each row's gradient is, per gradient of it
"""

from collections.abc import Callable, Sequence

import torch

from comm_collectives.base import dense
from comm_collectives.errors import CommTypeError, CommValueError

_BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "avg", "min", "max", "product", *_BITWISE)
NO_FACTOR = ("sum", "avg")  # ops whose gradient does not depend on the values
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_NATIVE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_NATIVE |= {torch.int8, torch.uint8, torch.int32, torch.int64}
# Sums and products modulo 2^n survive a detour through more bits, and order does too.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
    torch.uint64: torch.int64,
}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}
_ORDERED = ("min", "max")
_TOP_BIT = -(1 << 63)
_AT_ONCE_BYTES = 1 << 16


def check_op(dtype: torch.dtype, op: str) -> None:
    """Check that a reduction is defined for a dtype.

    Raises:
        ValueError: the op is unknown.
        TypeError: the dtype has no such arithmetic.
    """
    if op not in OPS:
        raise CommValueError(f"op={op!r} is unknown; choose one of {', '.join(OPS)}")
    if not _is_defined(dtype, op):
        raise CommTypeError(
            f"op={op!r} is not defined for {dtype}; convert to a dtype with that arithmetic first "
            "(float32 for fp8, int64 for counting bools)"
        )


def is_native(dtype: torch.dtype, op: str) -> bool:
    """Whether a backend reduces `to_backend` of this dtype with the right bits, NaN included."""
    if dtype in _COMPLEX or op in _BITWISE:
        return op in NO_FACTOR
    return dtype in _WIDER or (
        dtype in _NATIVE and not (dtype.is_floating_point and op in _ORDERED)
    )


def to_backend(x: torch.Tensor, op: str) -> torch.Tensor:
    """Copy `x` into a dtype that backends have and in which the op gives the same bits."""
    if x.dtype == torch.uint64:
        # The same bits as int64: sums and products wrap alike, order needs the top bit flipped.
        return dense(x).view(torch.int64) ^ (_TOP_BIT if op in _ORDERED else 0)
    if x.dtype == torch.complex32:
        # By way of pairs, because torch warns when it allocates complex32.
        return torch.view_as_complex(torch.view_as_real(dense(x)).float())
    return dense(x).to(_WIDER.get(x.dtype, x.dtype), copy=True)


def from_backend(work: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Return the result of `to_backend` and the op as `dtype`."""
    if dtype == torch.uint64:
        return (work ^ (_TOP_BIT if op in _ORDERED else 0)).view(torch.uint64)
    if dtype == torch.complex32:
        return torch.view_as_complex(torch.view_as_real(work).half())
    return work.to(dtype)


def reduce_into(out: torch.Tensor, rows: Sequence[torch.Tensor], op: str) -> None:
    """As `reduce_rows`, of rows apart, into memory of at most one of the first two."""
    # The sum of two short floats is rounded once in any case.
    is_exact = _is_its_own(out.dtype) or (len(rows) == 2 and op == "sum" and out.dtype in _NATIVE)
    if len(rows) == 1 or not is_exact:
        out.copy_(reduce_rows(torch.stack(list(rows)), op))
        return
    _COMBINE[op](rows[0], rows[1], out=out)
    for row in rows[2:]:
        _COMBINE[op](out, row, out=out)
    if op == "avg":
        out /= len(rows)


def reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce [n, ...] to [...] in the order of the rows; n > 0.

    Floating dtypes of 16 bits or less are added up in float32 and rounded once. Sums are defined
    for fp8 as well here, since gradients may have such a dtype.
    """
    # Few bytes of many ranks cost time per operation; many bytes cost memory for the copy.
    at_once = rows.nbytes <= _AT_ONCE_BYTES
    prepared = iter(_to_local(rows, op)) if at_once else (_to_local(row, op) for row in rows)
    work = next(prepared)
    for row in prepared:
        work = _COMBINE[op](work, row)
    if op == "avg":
        work = work / len(rows)
    return from_backend(work, rows.dtype, op)


def _is_defined(dtype: torch.dtype, op: str) -> bool:
    if op in _BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype in _NATIVE:
        return op != "avg" or dtype.is_floating_point
    if dtype in _COMPLEX:
        return op not in _ORDERED
    return dtype in _WIDER and op != "avg" and (op != "sum" or dtype != torch.bool)


def gradient_factors(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Return [n, ...]: the gradient of each row per gradient of the result, of min, max, product.

    Rows are floating or complex. Those that attain an extreme share its gradient equally, as in
    `torch.amax`. That of a product is the product of the others, without a division, so zeros are
    exact.
    """
    work = _to_local(rows, op)
    if op == "product":
        one = torch.ones_like(work[:1])
        before = torch.cat([one, work[:-1]]).cumprod(0)
        after = torch.cat([one, work[1:].flip(0)]).cumprod(0).flip(0)
        factors = (before * after).conj().resolve_conj()
    else:
        extreme = work.amax(0) if op == "max" else work.amin(0)
        attains = (work == extreme).to(work.dtype)
        factors = attains / attains.sum(0)
    return from_backend(factors, rows.dtype, op)


def _is_its_own(dtype: torch.dtype) -> bool:
    """Whether torch computes on the dtype as it is, without rounding on the way."""
    return dtype in _NATIVE and not (dtype.is_floating_point and dtype.itemsize <= 2)


def _to_local(x: torch.Tensor, op: str) -> torch.Tensor:
    """Return `x` in a dtype in which torch computes the op, with bits to spare."""
    if _is_its_own(x.dtype):
        return dense(x)
    is_short = x.dtype.is_floating_point and x.dtype.itemsize <= 2
    return dense(x).float() if is_short else to_backend(x, op)

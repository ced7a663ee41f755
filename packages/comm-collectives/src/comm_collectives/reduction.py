"""All-reduce that is right for strided inputs and every dtype whose arithmetic is defined.

Raw gloo reduces the wrong elements of a strided tensor without a word, and refuses int16 and the
wider unsigned integers. Here the input is never touched, the result is a new tensor, and a dtype
that the backend lacks is reduced in a wider one where that is exact.

    total = all_reduce(x)            # x unchanged
    largest = all_reduce(x, op="max")
"""

import torch
import torch.distributed as dist

from comm_collectives.calls import Call
from comm_collectives.groups import check_timeout, group_state
from comm_collectives.wire import check_dense, dense

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_NATIVE = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}
# Sums and products modulo 2^n survive a detour through more bits, and order does too.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
    torch.uint64: torch.int64,
}
_ORDERED = ("min", "max")
_TOP_BIT = -(1 << 63)
_COMPLEX = {torch.complex64, torch.complex128}


def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Reduce `x` element by element over the ranks and return the same result on each.

    Collective: every rank of the group must call with the same shape, dtype and op. Not
    differentiable. `x` may have any strides and is not modified.

    Args:
        x: any shape; floating (not fp8), integer, complex (sum, avg), bool (min, max, product).
            Sums of integers wrap around, as everywhere in torch.
        op: one of "sum", "avg" (floating and complex only), "min", "max", "product".
        group: None is the default group.
        timeout_s: limit in seconds; None is the group's own limit.

    Returns:
        New contiguous tensor of the shape, dtype and device of `x`.

    Raises:
        ValueError: the op is unknown.
        TypeError: the op is not defined for the dtype (raised alike on every rank).
        CommError: the reduction failed; see the subclasses.
    """
    resolved, state = group_state(group)
    check_timeout(timeout_s)
    check_dense(x, "x")
    _check_op(x.dtype, op)
    call = Call(state, "all_reduce", timeout_s=timeout_s)
    work = _to_arithmetic(x, op)
    # On the same storage, so that the result lands in `work`.
    flat = torch.view_as_real(work) if work.is_complex() else work
    if state.size > 1 and flat.numel():
        call.run(
            lambda: dist.all_reduce(flat, op=_OPS[op], group=resolved, async_op=True),
            on_cpu=flat.device.type == "cpu",
        )
    if op == "avg":
        work /= state.size
    return _from_arithmetic(work, x.dtype, op)


def _to_arithmetic(x: torch.Tensor, op: str) -> torch.Tensor:
    """Copy `x` into a dtype that the backend reduces and in which the op gives the same bits."""
    if x.dtype != torch.uint64:
        return dense(x).to(_WIDER.get(x.dtype, x.dtype), copy=True)
    # The same bits as int64: sums and products wrap alike, and order needs the top bit flipped.
    return dense(x).view(torch.int64) ^ (_TOP_BIT if op in _ORDERED else 0)


def _from_arithmetic(work: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    if dtype != torch.uint64:
        return work.to(dtype)
    return (work ^ (_TOP_BIT if op in _ORDERED else 0)).view(torch.uint64)


def _check_op(dtype: torch.dtype, op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"op={op!r} is unknown; choose one of {', '.join(_OPS)}")
    if dtype in _NATIVE and (op != "avg" or dtype.is_floating_point):
        return
    if dtype in _COMPLEX and op in ("sum", "avg"):
        return
    if dtype in _WIDER and (
        op in ("min", "max", "product") or (op == "sum" and dtype != torch.bool)
    ):
        return
    raise TypeError(
        f"op={op!r} is not defined for {dtype}; convert to a dtype with that arithmetic first "
        "(float32 for fp8, int64 for counting bools)"
    )

"""All-to-all of rows: right for every dtype, stride and split, differentiable, hard to misuse.

`torch.distributed.all_to_all_single` takes the output first, refuses many dtypes and strided
inputs on gloo, and writes wrong values into strided outputs. Here the input is the only tensor
argument and the output is new, so neither can happen. Rows travel as bytes.

    y = all_to_all(x, input_splits=[2, 0, 5])   # rows 0-1 to rank 0, none to rank 1, 2-6 to rank 2
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from comm_collectives.calls import Call
from comm_collectives.counts import Signature, exchange_counts
from comm_collectives.groups import GroupState, check_timeout, group_state
from comm_collectives.wire import as_bytes, check_dense, dense, dtype_code, from_bytes, num_bytes


def all_to_all(
    x: torch.Tensor,
    *,
    input_splits: Sequence[int] | None = None,
    output_splits: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Send consecutive rows of `x` to each rank and return the rows received, by source rank.

    Collective: every rank of the group must call, also one without rows. Differentiable; the
    backward is an all-to-all in the other direction and must then run on every rank too.

    Args:
        x: [rows, ...], any plain dtype, any strides; not modified. The trailing shape and the dtype
            are the same on every rank.
        input_splits: rows for each rank, summing to `rows`; None splits evenly.
        output_splits: rows from each rank; None asks the peers (one more small exchange, which also
            detects peers with another dtype or row shape).
        group: None is the default group.
        timeout_s: limit in seconds for each exchange; None is the group's own limit.

    Returns:
        New tensor [sum(output_splits), ...] of the dtype and device of `x`.

    Raises:
        ValueError: the splits do not fit `x` or the group.
        TypeError: `x` is not a dense tensor of a plain dtype.
        CommError: the exchange failed; see the subclasses.
    """
    resolved, state = group_state(group)
    check_timeout(timeout_s)
    check_dense(x, "x")
    if x.dim() == 0:
        raise ValueError("x has no dims; all_to_all moves rows along dim 0, so give [rows, ...]")
    sent, refused = _checked_input_splits(x, input_splits, state.size)
    call = Call(state, "all_to_all", timeout_s=timeout_s)
    if output_splits is None and state.size > 1:
        received = _ask_counts(x, sent, resolved, call, refused)
    elif refused is not None:
        raise refused
    elif output_splits is None:
        received = sent
    else:
        received = _checked_splits(output_splits, state.size, "output_splits")
    exchange = _Exchange(group=resolved, state=state, sent=sent, received=received, call=call)
    return cast(torch.Tensor, _AllToAll.apply(x, exchange))


def exchange_rows(
    call: Call,
    group: dist.ProcessGroup,
    x: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Exchange rows of a contiguous `x` without gradients; the primitive under everything here.

    `out` is contiguous, [sum(received), ...], with the row shape, dtype and device of `x`.
    """
    row_bytes = num_bytes(x.dtype, x.shape[1:])
    source, target = as_bytes(x), as_bytes(out)
    travel = call.state.transport_type(x.device)
    staged = travel != x.device.type
    if staged:
        source, target = source.to(travel), torch.empty_like(target, device=travel)
    call.run(
        lambda: dist.all_to_all_single(
            target,
            source,
            [n * row_bytes for n in received],
            [n * row_bytes for n in sent],
            group=group,
            async_op=True,
        ),
        on_cpu=travel == "cpu",
    )
    if staged:
        as_bytes(out).copy_(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    group: dist.ProcessGroup
    state: GroupState
    sent: tuple[int, ...]
    received: tuple[int, ...]
    call: Call


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        if exchange.state.size == 1:
            return dense(x).clone()
        y = _new_rows(x, sum(exchange.received))
        exchange_rows(exchange.call, exchange.group, dense(x), exchange.sent, exchange.received, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange = ctx.exchange
        if exchange.state.size == 1:
            return grad, None
        timeout_s = exchange.call.timeout_s
        call = Call(exchange.state, "all_to_all (backward)", timeout_s=timeout_s)
        rows = _new_rows(grad, sum(exchange.sent))
        exchange_rows(call, exchange.group, dense(grad), exchange.received, exchange.sent, rows)
        return rows, None


def _new_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    # As bytes, because torch warns when it allocates complex32.
    shape = (rows, *x.shape[1:])
    flat = torch.empty(num_bytes(x.dtype, shape), dtype=torch.uint8, device=x.device)
    return from_bytes(flat, x.dtype, shape)


def _ask_counts(
    x: torch.Tensor,
    sent: tuple[int, ...],
    group: dist.ProcessGroup,
    call: Call,
    refused: Exception | None,
) -> tuple[int, ...]:
    """Tell each peer how many rows it gets, and return how many come from each."""
    numel = math.prod(x.shape[1:])
    counts = exchange_counts(
        call,
        group,
        [[rows] for rows in sent],
        signature=Signature(
            words=(dtype_code(x.dtype), numel),
            text=f"rows of {numel} x {x.dtype} (dtype number, elements)",
        ),
        device=_control_device(x, call.state),
        refused=refused,
    )
    return tuple(row[0] for row in counts.rows)


def _control_device(x: torch.Tensor, state: GroupState) -> torch.device:
    travel = state.transport_type(x.device)
    return x.device if x.device.type == travel else torch.device(travel)


def _checked_input_splits(
    x: torch.Tensor, splits: Sequence[int] | None, size: int
) -> tuple[tuple[int, ...], Exception | None]:
    """Return the splits, or zeros and what is wrong with them, for the peers to know."""
    try:
        return _input_splits(x, splits, size), None
    except (TypeError, ValueError) as error:
        return (0,) * size, error


def _input_splits(x: torch.Tensor, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    rows = x.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"x has {rows} rows, which {size} ranks cannot share evenly; give input_splits"
            )
        return (rows // size,) * size
    checked = _checked_splits(splits, size, "input_splits")
    if sum(checked) != rows:
        raise ValueError(
            f"input_splits={list(checked)} sum to {sum(checked)} but x has {rows} rows; "
            "make them cover x exactly"
        )
    return checked


def _checked_splits(splits: Sequence[int], size: int, name: str) -> tuple[int, ...]:
    try:
        checked = tuple(index(n) for n in splits)
    except TypeError as error:
        raise TypeError(f"{name}={splits!r} must be a sequence of integers") from error
    if len(checked) != size or any(n < 0 for n in checked):
        raise ValueError(
            f"{name}={list(checked)} must hold {size} row counts >= 0, one per rank of the group"
        )
    return checked

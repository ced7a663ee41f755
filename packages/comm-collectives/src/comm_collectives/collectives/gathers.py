"""Every rank's rows on every rank, and its counterpart: a sum of which each rank keeps its rows.

Rows travel as bytes, with their counts, and sums are taken by the rank that keeps them, in the
order of the ranks: the same bits at every run, whatever the splits.

    everything = all_gather(x)                       # x: [any number of rows, ...]
    mine = reduce_scatter(everything, splits=[3, 0, 2])
"""

from collections.abc import Sequence
from functools import partial
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import dense
from comm_collectives.call import Call, Checks
from comm_collectives.call.autograd import Back, Gradients, attach, wants_grad
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument, Status
from comm_collectives.collectives.alltoall import row_splits
from comm_collectives.collectives.arithmetic import (
    NO_FACTOR,
    OPS,
    check_op,
    gradient_factors,
    reduce_rows,
)
from comm_collectives.collectives.exchange import on_host
from comm_collectives.collectives.pieces import (
    check_rows,
    exchange_pieces,
    gather_rows,
    meet_rows,
    return_pieces,
    row_arguments,
)


@overload
def all_gather(x: torch.Tensor, **options: Unpack[CallNow]) -> torch.Tensor: ...
@overload
def all_gather(x: torch.Tensor, **options: Unpack[CallLater]) -> Handle[torch.Tensor]: ...
@graph_break
def all_gather(
    x: torch.Tensor,
    *,
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Return the rows of all ranks, concatenated along dim 0 in the order of the ranks.

    Collective: every rank of the group must call, also one without rows. Differentiable; the
    gradient is that of the sum of all ranks' losses. All of it is one exchange.

    Args:
        x: [rows, ...], any plain dtype, any strides; not modified. Ranks may have different numbers
            of rows; the row shape and the dtype are the same on every rank.
        group: None is the default group.
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the rows.

    Returns:
        New tensor [sum of rows, ...] of the dtype and device of `x`.

    Raises:
        RefusedError: some rank's `x` has no dims (on every rank).
        RefusedTypeError: some rank's `x` is not a dense tensor of a plain dtype (on every rank).
        MismatchError: ranks differ in dtype or row shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)
    run = partial(all_gather_call, x, state, timeout_s)
    return launch(state, "all_gather", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


@overload
def reduce_scatter(
    x: torch.Tensor,
    *,
    splits: Sequence[int] | None = ...,
    op: str = ...,
    **options: Unpack[CallNow],
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    *,
    splits: Sequence[int] | None = ...,
    op: str = ...,
    **options: Unpack[CallLater],
) -> Handle[torch.Tensor]: ...
@graph_break
def reduce_scatter(
    x: torch.Tensor,
    *,
    splits: Sequence[int] | None = None,
    op: str = "sum",
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Reduce `x` over the ranks and return the rows of the result that are this rank's.

    Collective: every rank of the group must call with the same shape, dtype, splits and op.
    Differentiable as `all_reduce`. The rank that keeps a row reduces it in the order of the ranks
    (16-bit floats in float32, rounded once), so the bits are the same at every run and for every
    way to split.

    Args:
        x: [rows, ...], any strides; not modified. The dtypes are those of `all_reduce`.
        splits: rows that each rank keeps, summing to `rows`; None splits evenly.
        op: one of "sum", "avg" (floating and complex only), "min", "max", "product".
        group: None is the default group.
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the rows.

    Returns:
        New tensor [splits[rank], ...] of the dtype and device of `x`.

    Raises:
        RefusedError: on some rank the op is unknown or the splits do not fit (on every rank).
        RefusedTypeError: the op is not defined for the dtype of some rank (on every rank).
        MismatchError: ranks differ in shape, dtype, splits or op (on every rank where compared).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)
    run = partial(reduce_scatter_call, x, splits, op, state, timeout_s)
    return launch(state, "reduce_scatter", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


def all_gather_call(
    x: torch.Tensor,
    state: GroupState,
    timeout_s: float | None,
    *,
    name: str = "all_gather",
    refused: ValueError | TypeError | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run `all_gather` under a name, on this thread.

    `refused` is what is wrong already. With `out` (contiguous, apart from `x`) all ranks have
    equally many rows, which are written there.
    """
    with Checks(refused) as checks:
        check_rows(x, name)
        checks.arguments = row_arguments(state, x)
        if out is not None:
            checks.arguments += (Argument("rows", len(x)),)
    call = checks.call(state, name, timeout_s)
    status = Status.WANTS_GRAD if wants_grad(x) else 0
    flags, counts, y = meet_rows(call, x, status=status, readers=range(state.size), out=out)
    if not flags & Status.WANTS_GRAD:
        return y

    def back(grads: Gradients, call: Call) -> Gradients:
        return (reduce_rows(exchange_pieces(call, grads[0], counts)[1], "sum"),)

    return attach((x,), (y,), call, Back(run=back))[0]


def reduce_scatter_call(
    x: torch.Tensor,
    splits: Sequence[int] | None,
    op: str,
    state: GroupState,
    timeout_s: float | None,
    *,
    name: str = "reduce_scatter",
    refused: ValueError | TypeError | None = None,
) -> torch.Tensor:
    """Run `reduce_scatter` under a name, on this thread; `refused` is what is wrong already."""
    with Checks(refused) as checks:
        check_rows(x, name)
        check_op(x.dtype, op)
        kept = row_splits(x.shape[0], splits, state.size, "splits")
        checks.arguments = (
            *row_arguments(state, x),
            Argument.of_shape("splits", kept),
            Argument("op", OPS.index(op), op),
        )
    call = checks.call(state, name, timeout_s)
    status = Status.WANTS_GRAD if wants_grad(x) else 0
    if not on_host(state, x.device) and call.is_due():
        status = call.meet(status=status).flags
    flags, rows = exchange_pieces(call, dense(x), kept, status=status)
    y = reduce_rows(rows, op)
    if not flags & Status.WANTS_GRAD:
        return y
    factor: torch.Tensor | float = 1.0 / state.size
    if op not in NO_FACTOR:
        factor = return_pieces(call, gradient_factors(rows, op), kept)

    def back(grads: Gradients, call: Call) -> Gradients:
        return (gather_rows(call, grads[0], kept),)

    def finish(grads: Gradients) -> Gradients:
        return grads if op == "sum" else (grads[0] * factor,)

    return attach((x,), (y,), call, Back(run=back, finish=finish))[0]

"""All-reduce that is right for strided inputs and every dtype whose arithmetic is defined.

The input is never touched, the result is a new tensor, and what a backend does not get right (NaN
in a maximum, strides, many dtypes) is exchanged in pieces and reduced by the ranks.

    total = all_reduce(x)            # x unchanged
    largest = all_reduce(x, op="max")
"""

from functools import partial
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, check_dense, dense, new_tensor
from comm_collectives.call import Call, Checks
from comm_collectives.call.autograd import Back, Gradients, attach, wants_grad
from comm_collectives.call.groups import Group, GroupState, group_state, wire_device_argument
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument, Status
from comm_collectives.collectives.arithmetic import (
    NO_FACTOR,
    OPS,
    from_backend,
    gradient_factors,
    is_native,
    reduce_into,
    reduce_rows,
    to_backend,
)
from comm_collectives.collectives.arithmetic import check_op as check_op
from comm_collectives.collectives.exchange import on_host, run_on_device, show
from comm_collectives.collectives.pieces import (
    even_splits,
    exchange_pieces,
    gather_rows,
    return_pieces,
)

_WHOLE_BYTES = 1 << 16
_MOST_WHOLE_BYTES = 1 << 20
# The gradient of this rank's input per gradient of the result, where that varies.
_Factor = torch.Tensor | None


@overload
def all_reduce(x: torch.Tensor, *, op: str = ..., **options: Unpack[CallNow]) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor, *, op: str = ..., **options: Unpack[CallLater]
) -> Handle[torch.Tensor]: ...
@graph_break
def all_reduce(
    x: torch.Tensor,
    *,
    op: str = "sum",
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Reduce `x` element by element over the ranks and return the same result on each.

    Collective: every rank of the group must call with the same shape, dtype and op. `x` may have
    any strides and is not modified. The result is the same on every rank; on the host it is
    summed in the order of the ranks (16-bit floats in float32), so its bits are so at every run.

    Differentiable: the gradient is that of the sum of all ranks' losses. That of min and max goes
    to the ranks that attain it, in equal shares, as in `torch.amax`; that of a product is exact
    with zeros too.

    Args:
        x: any shape; floating (not fp8), integer, complex (sum, avg, product), bool (min, max,
            product). Sums of integers wrap around and extremes keep a NaN, as everywhere in torch.
        op: one of "sum", "avg" (floating and complex only), "min", "max", "product".
        group: None is the default group.
        timeout_s: limit in seconds; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the result.

    Returns:
        New contiguous tensor of the shape, dtype and device of `x`.

    Raises:
        RefusedError: the op of some rank is unknown (on every rank).
        RefusedTypeError: the op is not defined for the dtype of some rank (on every rank).
        MismatchError: ranks differ in shape, dtype or op (on every rank where it is compared).
        CommError: the reduction failed; see the subclasses.
    """
    state = group_state(group)
    run = partial(all_reduce_call, x, op, state, timeout_s)
    return launch(state, "all_reduce", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


def reduce_plain(call: Call, x: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce without gradients; `op` is known to fit the dtype."""
    state = call.state
    if on_host(state, x.device):
        return _reduce_on_host(call, x, op, 0)[1]
    if not is_native(x.dtype, op):
        return _reduce_by_pieces(call, x, op, with_factor=False)[0]
    work = to_backend(x, op)
    # On the same storage, so that the result lands in `work`.
    flat = torch.view_as_real(work) if work.is_complex() else work
    plain = "sum" if op == "avg" else op  # not every backend has an average

    def run(_: torch.Tensor, place: torch.Tensor) -> None:
        call.run(lambda: state.transport.all_reduce(place, plain))

    if state.size > 1 and flat.numel():
        run_on_device(call, flat, flat, run)
    if op == "avg":
        work /= state.size
    return from_backend(work, x.dtype, op)


def all_reduce_call(
    x: torch.Tensor,
    op: str,
    state: GroupState,
    timeout_s: float | None,
    *,
    name: str = "all_reduce",
    root: int | None = None,
    refused: ValueError | TypeError | None = None,
) -> torch.Tensor:
    """Run `all_reduce` under a name, on this thread; `refused` is what is wrong already.

    The ranks agree on the `root`, if any; every one gets the result.
    """
    with Checks(refused) as checks:
        check_dense(x, "x")
        check_op(x.dtype, op)
        checks.arguments = (
            Argument.of_dtype(x.dtype),
            Argument.of_shape("shape", x.shape),
            Argument("op", OPS.index(op), op),
            wire_device_argument(state, x.device),
            *(() if root is None else (Argument("dst", root),)),
        )
    call = checks.call(state, name, timeout_s)
    flags = Status.WANTS_GRAD if wants_grad(x) else 0
    factor = None
    if on_host(state, x.device):
        flags, y, factor = _reduce_on_host(call, x, op, flags)
    else:
        flags = call.meet(status=flags).flags if call.is_due() else flags
        if flags & Status.WANTS_GRAD and op not in NO_FACTOR:
            y, factor = _reduce_by_pieces(call, x, op, with_factor=True)
        else:
            y = reduce_plain(call, x, op)
    if not flags & Status.WANTS_GRAD:
        return y.data  # no view to autograd, as in `from_bytes`
    # The gradient of the sum of all ranks' losses: theirs are added up, whatever the op.
    backward_op = op if op in NO_FACTOR else "sum"

    def back(grads: Gradients, call: Call) -> Gradients:
        return (reduce_plain(call, grads[0], backward_op),)

    def finish(grads: Gradients) -> Gradients:
        return (grads[0] if factor is None else grads[0] * factor,)

    return attach((x,), (y,), call, Back(run=back, finish=finish))[0]


def _reduce_on_host(
    call: Call, x: torch.Tensor, op: str, flags: int
) -> tuple[int, torch.Tensor, _Factor]:
    """Agree, and reduce in the order of the ranks; return the flags of all as well.

    Few bytes go to every rank as they are, in one exchange. Of many each rank reduces a piece, and
    the pieces are gathered: the same bits either way.
    """
    state = call.state
    flat = dense(x).view(-1).cpu()
    if (state.size - 2) * flat.nbytes > _WHOLE_BYTES or flat.nbytes > _MOST_WHOLE_BYTES:
        return _reduce_pieces_on_host(call, x, flat, op, flags)
    rows = new_tensor((state.size, flat.numel()), x.dtype, "cpu")
    sent = [as_bytes(flat)] * state.size
    flags = show(call, sent, lambda _: as_bytes(rows), status=flags)[0].flags
    factor = None
    if flags & Status.WANTS_GRAD and op not in NO_FACTOR:
        factor = gradient_factors(rows, op)[state.rank].clone().view(x.shape).to(x.device)
    return flags, reduce_rows(rows, op).view(x.shape).to(x.device), factor


def _reduce_pieces_on_host(
    call: Call, x: torch.Tensor, flat: torch.Tensor, op: str, flags: int
) -> tuple[int, torch.Tensor, _Factor]:
    state = call.state
    splits = even_splits(flat.numel(), state.size)
    whole = new_tensor(flat.shape, x.dtype, flat.device)
    pieces, parts = flat.split(splits), whole.split(splits)
    factor = None
    with state.scratch.lease(flat.device) as lease:
        table = lease.take((state.size, splits[state.rank]), x.dtype)
        sizes = [n * x.dtype.itemsize for n in splits]
        sent = as_bytes(flat).split(sizes)
        rows, got = list(table), list(as_bytes(table).split([sizes[state.rank]] * state.size))
        # What is this rank's own is read where it is.
        rows[state.rank], got[state.rank] = pieces[state.rank], sent[state.rank]
        flags = call.exchange(sent, lambda _: got, status=flags).flags
        reduce_into(parts[state.rank], rows, op)
        if flags & Status.WANTS_GRAD and op not in NO_FACTOR:
            factor = return_pieces(call, gradient_factors(torch.stack(rows), op), splits)
            factor = factor.view(x.shape).to(x.device)
    shown = as_bytes(whole).split(sizes)
    call.exchange([shown[state.rank]] * state.size, lambda _: shown)
    return flags, whole.view(x.shape).to(x.device), factor


def _reduce_by_pieces(
    call: Call, x: torch.Tensor, op: str, *, with_factor: bool
) -> tuple[torch.Tensor, _Factor]:
    """Reduce a piece on each rank, in the order of the ranks, and gather the pieces."""
    splits = even_splits(x.numel(), call.state.size)
    rows = exchange_pieces(call, dense(x).view(-1), splits)[1]
    piece = reduce_rows(rows, op)
    factor = None
    if with_factor:
        factor = return_pieces(call, gradient_factors(rows, op), splits).view(x.shape)
    return gather_rows(call, piece, splits).view(x.shape), factor

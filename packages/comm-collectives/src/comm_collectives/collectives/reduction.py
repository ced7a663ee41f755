"""All-reduce that is right for strided inputs and every dtype whose arithmetic is defined.

Raw gloo reduces the wrong elements of a strided tensor without a word, loses a NaN in a maximum,
and refuses int16 and the wider unsigned integers. Here the input is never touched, the result is a
new tensor, and what the backend does not get right is exchanged in pieces and reduced by the ranks.

    total = all_reduce(x)            # x unchanged
    largest = all_reduce(x, op="max")
"""

from dataclasses import dataclass
from typing import Literal, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, bytes_of, check_dense, dense, joined
from comm_collectives.call import Call, fits_page
from comm_collectives.call.autograd import Back, attach, wants_grad, zeros_for
from comm_collectives.call.control import PAGE_BYTES
from comm_collectives.call.groups import Group, GroupState, group_state, wire_device_argument
from comm_collectives.call.handles import Handle, launch
from comm_collectives.call.signature import INLINE_BYTES, Argument, Status
from comm_collectives.collectives.arithmetic import (
    NO_FACTOR,
    OPS,
    from_backend,
    gradient_factors,
    is_native,
    reduce_rows,
    to_backend,
)
from comm_collectives.collectives.arithmetic import check_op as check_op
from comm_collectives.collectives.pieces import (
    even_splits,
    exchange_pieces,
    gather_rows,
    return_pieces,
)

_MOST_READ_BYTES = 1 << 21


@overload
def all_reduce(
    x: torch.Tensor,
    *,
    op: str = ...,
    group: Group | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor,
    *,
    op: str = ...,
    group: Group | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[True],
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
    any strides and is not modified. The result is the same on every rank; up to 384 bytes, or
    on one host 512 KiB, travel with the control exchange, in one exchange.

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

    def run() -> torch.Tensor:
        return all_reduce_call(x, op, state, timeout_s)

    inputs = [x] if isinstance(x, torch.Tensor) else []
    return launch(state, "all_reduce", run, inputs=inputs, async_op=async_op)  # type: ignore[no-any-return]


def reduce_plain(call: Call, x: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce without a control exchange and without gradients; `op` is known to fit the dtype."""
    state = call.state
    if not is_native(x.dtype, op):
        return _reduce_by_pieces(call, x, op, with_factor=False).result
    work = to_backend(x, op)
    # On the same storage, so that the result lands in `work`.
    flat = torch.view_as_real(work) if work.is_complex() else work
    if state.size > 1 and flat.numel():
        travel = state.transport_type(flat.device)
        place = flat if travel == flat.device.type else flat.to(travel)
        plain = "sum" if op == "avg" else op  # gloo has no average
        call.run(lambda: state.transport.all_reduce(place, plain), on_cpu=travel == "cpu")
        if place is not flat:
            flat.copy_(place)
    if op == "avg":
        work /= state.size
    return from_backend(work, x.dtype, op)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduced:
    """The result, and the gradient of this rank's input per gradient of it where that varies."""

    result: torch.Tensor
    factor: torch.Tensor | None = None


def all_reduce_call(
    x: torch.Tensor,
    op: str,
    state: GroupState,
    timeout_s: float | None,
    *,
    refused: ValueError | TypeError | None = None,
) -> torch.Tensor:
    """Run `all_reduce` on this thread; `refused` is what is wrong already."""
    arguments: tuple[Argument, ...] = ()
    is_inline = False
    try:
        check_dense(x, "x")
        # Known before the rest is refused, since ranks whose x is inline meet.
        is_inline = _is_inline(x, state)
        check_op(x.dtype, op)
        arguments = (
            Argument.of_dtype(x.dtype),
            Argument.of_shape("shape", x.shape),
            Argument("op", OPS.index(op), op),
            wire_device_argument(state, x.device),
        )
    except (TypeError, ValueError) as error:
        refused = refused or error
    call = Call(state, "all_reduce", arguments=arguments, timeout_s=timeout_s)
    flags = Status.WANTS_GRAD if refused is None and wants_grad(x) else 0
    if is_inline:
        flags, reduced = _reduce_in_exchange(call, x, op, flags, refused)
    else:
        flags = call.meet_if_due(status=flags, refused=refused)
        if _may_be_inline(x, state):
            call.open_pages()
        with_factor = bool(flags & Status.WANTS_GRAD) and op not in NO_FACTOR
        # With new pages `x` is inline from the next time on; the first sum is rounded like those.
        alike = _is_inline(x, state)
        reduced = _reduce(call, x, op, with_factor=with_factor, in_rank_order=alike)
    if not flags & Status.WANTS_GRAD:
        return reduced.result
    return _attach(x, reduced, op, call)


def _attach(x: torch.Tensor, reduced: _Reduced, op: str, call: Call) -> torch.Tensor:
    # The gradient of the sum of all ranks' losses: theirs are added up, whatever the op.
    backward_op = op if op in NO_FACTOR else "sum"
    factor = reduced.factor

    def back(grads: tuple[torch.Tensor, ...], call: Call) -> tuple[torch.Tensor, ...]:
        return (reduce_plain(call, grads[0], backward_op),)

    def finish(grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (grads[0] if factor is None else grads[0] * factor,)

    y = reduced.result
    return attach((x,), (y,), call, Back(run=back, zeros=zeros_for(y), finish=finish))[0]


def _may_be_inline(x: torch.Tensor, state: GroupState) -> bool:
    """Whether `x` may travel with a control exchange: the same on every rank, if shapes agree."""
    # On pages every rank reads what every other shows.
    most = min(PAGE_BYTES, _MOST_READ_BYTES // state.size)
    compares = state.size > 1 and state.policy.every > 0
    return compares and x.nbytes <= most and state.carries_inline(x.device)


def _is_inline(x: torch.Tensor, state: GroupState) -> bool:
    """Whether `x` travels with this control exchange."""
    return _may_be_inline(x, state) and (x.nbytes <= INLINE_BYTES or fits_page(x.nbytes, state))


def _reduce_in_exchange(
    call: Call, x: torch.Tensor, op: str, flags: int, refused: ValueError | TypeError | None
) -> tuple[int, _Reduced]:
    """Reduce what all ranks show each other; return the flags of all as well."""
    state, flat = call.state, as_bytes(dense(x)).cpu()

    def reduced(rows: torch.Tensor, flags: int) -> _Reduced:
        return _reduce_all(rows, op, state.rank, with_factor=bool(flags & Status.WANTS_GRAD))

    if x.nbytes <= INLINE_BYTES:
        agreed = call.meet(parts=[bytes_of(flat)] * state.size, status=flags, refused=refused)
        told = [part[: x.nbytes] for part in agreed.parts]
        rows = joined(told, x.dtype, (state.size, *x.shape), x.device)
        return agreed.flags, reduced(rows, agreed.flags)
    agreed = call.meet(status=flags, refused=refused, page=flat)

    def take(pages: torch.Tensor) -> _Reduced:
        rows = pages[:, : x.nbytes].view(x.dtype).view(state.size, *x.shape)
        return reduced(rows.to(x.device), agreed.flags)

    return agreed.flags, call.read(take)


def _reduce(
    call: Call, x: torch.Tensor, op: str, *, with_factor: bool, in_rank_order: bool
) -> _Reduced:
    if with_factor or in_rank_order:
        return _reduce_by_pieces(call, x, op, with_factor=with_factor)
    return _Reduced(result=reduce_plain(call, x, op))


def _reduce_by_pieces(call: Call, x: torch.Tensor, op: str, *, with_factor: bool) -> _Reduced:
    """Reduce a piece on each rank, in the order of the ranks, and gather the pieces."""
    splits = even_splits(x.numel(), call.state.size)
    rows = exchange_pieces(call, dense(x).view(-1), splits)
    piece = reduce_rows(rows, op)
    factor = None
    if with_factor:
        factor = return_pieces(call, gradient_factors(rows, op), splits).view(x.shape)
    return _Reduced(result=gather_rows(call, piece, splits).view(x.shape), factor=factor)


def _reduce_all(rows: torch.Tensor, op: str, rank: int, *, with_factor: bool) -> _Reduced:
    """Reduce the rows of all ranks, which every rank has."""
    factor = None
    if with_factor and op not in NO_FACTOR:
        factor = gradient_factors(rows, op)[rank].clone()
    return _Reduced(result=reduce_rows(rows, op), factor=factor)

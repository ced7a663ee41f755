"""All ranks give to one, or one to all of them apart: gather and scatter.

Ranks may have different sizes, which travel with the data, and results are new tensors.

    parts = gather(x, dst=0)         # a list on rank 0, None elsewhere
    mine = scatter(parts, src=0)     # x again
"""

from collections.abc import Sequence
from functools import partial
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, check_dense, check_tensors, dense, from_bytes, num_bytes
from comm_collectives.base.transport import TransferHeader
from comm_collectives.call import Agreed, Call, Checks
from comm_collectives.call.autograd import Back, Gradients, attach, wants_grad
from comm_collectives.call.groups import Group, GroupState, check_root, group_state
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument, Status
from comm_collectives.collectives.exchange import on_host
from comm_collectives.collectives.pieces import (
    Device,
    checked_device,
    described,
    meet_rows,
    row_arguments,
    send_from_one,
    send_to_one,
)
from comm_collectives.errors import CommValueError, MismatchError


@overload
def gather(
    x: torch.Tensor, *, dst: int, **options: Unpack[CallNow]
) -> list[torch.Tensor] | None: ...
@overload
def gather(
    x: torch.Tensor, *, dst: int, **options: Unpack[CallLater]
) -> Handle[list[torch.Tensor] | None]: ...
@graph_break
def gather(
    x: torch.Tensor,
    *,
    dst: int,
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> list[torch.Tensor] | Handle[list[torch.Tensor] | None] | None:
    """Return, on rank `dst`, the tensors of all ranks by rank; None elsewhere.

    Collective. Differentiable: where the gradient of some rank is wanted, the other ranks get as
    many tensors without rows instead of None, to which the gradient of their `x` is attached. Let
    them take part in the loss: `torch.cat(parts).sum()` is 0 there and right on every rank.

    Args:
        x: [rows, ...], any plain dtype, any strides; not modified. Ranks may have different numbers
            of rows; the row shape and the dtype are the same on every rank. Without dims, on every
            rank, it is a number, and so are the results.
        dst: rank inside the group.
        group: None is the default group.
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the result.

    Returns:
        On `dst` new tensors [rows of rank r, ...], which lie in one block of memory.

    Raises:
        RefusedError: `dst` of some rank is not a rank of the group (on every rank).
        RefusedTypeError: some rank's `x` is not a dense tensor of a plain dtype (on every rank).
        MismatchError: ranks differ in `dst`, dtype or row shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)
    run = partial(_gather, x, dst, state, timeout_s)
    return launch(state, "gather", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


@overload
def scatter(
    tensors: Sequence[torch.Tensor] | None,
    *,
    src: int,
    device: Device = ...,
    **options: Unpack[CallNow],
) -> torch.Tensor: ...
@overload
def scatter(
    tensors: Sequence[torch.Tensor] | None,
    *,
    src: int,
    device: Device = ...,
    **options: Unpack[CallLater],
) -> Handle[torch.Tensor]: ...
@graph_break
def scatter(
    tensors: Sequence[torch.Tensor] | None,
    *,
    src: int,
    device: Device = None,
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Return, on each rank r, tensor r of those that rank `src` gave.

    Collective. Differentiable: the gradients go back to `src`.

    Args:
        tensors: on `src` one for each rank, of one plain dtype and one device, any shapes and
            strides; not modified. Ignored elsewhere.
        src: rank inside the group.
        group: None is the default group.
        device: where the result goes; None is, on `src`, the device of the tensors, elsewhere the
            kind of device that the data travelled on (the host with gloo).
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the tensor.

    Returns:
        New contiguous tensor, also on `src`.

    Raises:
        RefusedError: `src` is not a rank of the group, it gave not one tensor for each rank, or
            tensors of several dtypes or devices; a device is unknown (on every rank).
        RefusedTypeError: an item is not a dense tensor of a plain dtype (on every rank).
        MismatchError: ranks differ in `src` (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)
    run = partial(_scatter, tensors, src, device, state, timeout_s)
    given = tensors if isinstance(tensors, list | tuple) and state.rank == src else ()
    return launch(state, "scatter", run, inputs=given, async_op=async_op)  # type: ignore[no-any-return]


def _gather(
    x: torch.Tensor, dst: int, state: GroupState, timeout_s: float | None
) -> list[torch.Tensor] | None:
    with Checks() as checks:
        check_dense(x, "x")
        check_root(state, dst, "dst")
        rows = x if x.dim() else x.reshape(1)
        asked = Argument("dst", int(dst)), Argument("dims", x.dim())
        checks.arguments = (*asked, *row_arguments(state, rows))
    call = checks.call(state, "gather", timeout_s, compares_site=False)
    status = Status.WANTS_GRAD if wants_grad(x) else 0
    flags, counts, whole = meet_rows(call, rows, status=status, readers=[dst])
    is_dst = state.rank == dst
    received = counts if is_dst else (0,) * state.size
    # Not views, which autograd would not let the user change in place.
    parts = [part.data for part in whole.split(list(received))]
    if is_dst and not x.dim():
        parts = [part.view(()).data for part in parts]
    if flags & Status.WANTS_GRAD:
        return _attach_gather(x, parts, call, counts, dst)
    return parts if is_dst else None


def _attach_gather(
    x: torch.Tensor, parts: list[torch.Tensor], call: Call, counts: Sequence[int], dst: int
) -> list[torch.Tensor]:
    dtype, shape, device = x.dtype, x.shape, x.device
    row_bytes = num_bytes(dtype, shape[1:])
    sizes = [n * row_bytes for n in counts]

    def back(grads: Gradients, call: Call) -> Gradients:
        own = torch.empty(sizes[call.state.rank], dtype=torch.uint8, device=device)
        send_from_one(call, torch.cat([as_bytes(grad) for grad in grads]), sizes, dst, own)
        return (from_bytes(own, dtype, shape),)

    return list(attach((x,), parts, call, Back(run=back)))


def _scatter(
    tensors: Sequence[torch.Tensor] | None,
    src: int,
    device: Device,
    state: GroupState,
    timeout_s: float | None,
) -> torch.Tensor:
    parts, status = [b""] * state.size, 0
    given: Sequence[torch.Tensor] = ()
    with Checks() as checks:
        check_root(state, src, "src")
        checks.arguments = (Argument("src", int(src)),)
        checked_device(device)
        if state.rank == src:
            given = _checked_tensors(tensors, state.size)
            parts = [described(tensor, state) for tensor in given]
            status = Status.WANTS_GRAD if wants_grad(*given) else 0
    call = checks.call(state, "scatter", timeout_s, compares_site=False)
    flags, header, own = _send_each(call, given, src, parts, status)
    kind = state.transport.place(header.travels[0])
    y = from_bytes(own, header.dtypes[0], header.shapes[0])
    y = y.to(device or (given[0].device if given else kind))
    if not flags & Status.WANTS_GRAD:
        return y
    return _attach_scatter(given, y, call, src, kind)


def _send_each(
    call: Call, given: Sequence[torch.Tensor], src: int, parts: list[bytes], status: int
) -> tuple[int, TransferHeader, torch.Tensor]:
    """Agree, and send each rank its tensor; return its bytes and what they are."""
    state = call.state
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    sent = [nothing] * state.size
    if given and on_host(state, given[0].device):
        sent = [as_bytes(dense(tensor)).cpu() for tensor in given]
    found: list[tuple[TransferHeader, torch.Tensor]] = []

    def place(agreed: Agreed) -> list[torch.Tensor]:
        header = TransferHeader.unpack(agreed.parts[src])
        if header is None:
            raise MismatchError(f"{call}: something else arrived; the ranks make different calls")
        length, kind = num_bytes(header.dtypes[0], header.shapes[0]), header.travels[0]
        own = torch.empty(length, dtype=torch.uint8, device=state.transport.place(kind))
        found.append((header, own))
        return [own if r == src and kind == "cpu" else nothing for r in range(state.size)]

    agreed = call.exchange(sent, place, parts=parts, status=status)
    header, own = found[0]
    if header.travels[0] != "cpu":
        bare = [as_bytes(dense(tensor)) for tensor in given]
        flat = torch.cat(bare) if bare else own[:0]
        sizes = [t.nbytes for t in given] or [own.numel()] * state.size
        send_from_one(call, flat, sizes, src, own)
    return agreed.flags, header, own


def _attach_scatter(
    given: Sequence[torch.Tensor], y: torch.Tensor, call: Call, src: int, kind: torch.device
) -> torch.Tensor:
    shapes, dtype, own_bytes = [t.shape for t in given], y.dtype, y.nbytes
    place = given[0].device if given else kind

    def back(grads: Gradients, call: Call) -> Gradients:
        sizes = [num_bytes(dtype, shape) for shape in shapes]
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=place)
        own = as_bytes(grads[0]).to(place)
        send_to_one(call, own, sizes or [own_bytes] * call.state.size, src, whole)
        pieces = zip(whole.split(sizes), shapes, strict=True) if shapes else ()
        return tuple(from_bytes(piece, dtype, shape) for piece, shape in pieces)

    return attach(given, (y,), call, Back(run=back))[0]


def _checked_tensors(tensors: Sequence[torch.Tensor] | None, size: int) -> Sequence[torch.Tensor]:
    given = check_tensors(tensors)
    if len(given) != size:
        raise CommValueError(f"{len(given)} tensors for {size} ranks; give one for each rank")
    kinds = {(str(tensor.dtype), str(tensor.device)) for tensor in given}
    if len(kinds) > 1:
        raise CommValueError(
            f"tensors are of several kinds, {sorted(kinds)}; give one dtype and one device"
        )
    return given

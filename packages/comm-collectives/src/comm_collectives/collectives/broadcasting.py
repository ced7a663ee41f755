"""Broadcast of one tensor, of which the receivers need not know anything.

Dtype and shape travel with the data, and the result is new. For values with several tensors see
`broadcast_nested`.

    weights = broadcast(weights if rank == 0 else None, src=0)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack, overload

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, check_dense, dense, from_bytes, num_bytes
from comm_collectives.base.transport import TransferHeader
from comm_collectives.call import Agreed, Call, Checks
from comm_collectives.call.autograd import Back, Gradients, attach, wants_grad
from comm_collectives.call.groups import Group, GroupState, check_root, group_state
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch
from comm_collectives.call.signature import Argument, Status
from comm_collectives.collectives.exchange import on_host
from comm_collectives.collectives.pieces import (
    Device,
    broadcast_bytes,
    checked_device,
    described,
    from_source,
    share,
    to_each,
)
from comm_collectives.collectives.reduction import reduce_plain
from comm_collectives.errors import MismatchError


@overload
def broadcast(
    x: torch.Tensor | None, *, src: int, device: Device = ..., **options: Unpack[CallNow]
) -> torch.Tensor: ...
@overload
def broadcast(
    x: torch.Tensor | None, *, src: int, device: Device = ..., **options: Unpack[CallLater]
) -> Handle[torch.Tensor]: ...
@graph_break
def broadcast(
    x: torch.Tensor | None,
    *,
    src: int,
    group: Group | None = None,
    device: Device = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Return, on every rank, the tensor that rank `src` gave.

    Collective. Differentiable for `src`: its gradient is that of the sum of all ranks' losses. All
    of it is one exchange, or two for more than 256 KiB between more than two ranks.

    Args:
        x: on `src`, any shape, plain dtype and strides; not modified. Elsewhere None, or a tensor
            whose dtype and shape have to be the same (its values are not used).
        src: rank inside the group.
        group: None is the default group.
        device: where the result goes; None is the device of `x`, or for None the kind of device
            that the data travelled on (the host with gloo).
        timeout_s: limit in seconds for each exchange; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the tensor.

    Returns:
        New contiguous tensor, also on `src`.

    Raises:
        RefusedError: `src` is not a rank of the group, or a device is unknown (on every rank).
        RefusedTypeError: `x` is not a dense tensor of a plain dtype, or None on `src` (on every
            rank).
        MismatchError: ranks differ in `src`, or their tensors in dtype or shape (on every rank).
        CommError: the exchange failed; see the subclasses.
    """
    state = group_state(group)

    def run() -> torch.Tensor:
        got = broadcast_call(x, src, device, state, timeout_s)
        y = got.y
        if not got.is_new:  # as bytes, because torch warns when it allocates complex32
            y = from_bytes(as_bytes(y).clone(), y.dtype, y.shape)
        if not got.flags & Status.WANTS_GRAD:
            return y
        return _attach(x if state.rank == src else None, y, got)

    return launch(state, "broadcast", run, inputs=[x], async_op=async_op)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Got:
    """The tensor, of the source itself where it is not new, and how it came."""

    y: torch.Tensor
    is_new: bool
    call: Call
    flags: int
    kind: torch.device


def broadcast_call(
    x: torch.Tensor | None,
    src: int,
    device: Device,
    state: GroupState,
    timeout_s: float | None,
    *,
    refused: ValueError | TypeError | None = None,
) -> _Got:
    """Run `broadcast` on this thread without gradients; `refused` is what is wrong already."""
    status, told, is_src = 0, b"", state.rank == src
    with Checks(refused) as checks:
        check_root(state, src, "src")
        checks.arguments = (Argument("src", int(src)),)
        checked_device(device)
        if x is not None or is_src:
            check_dense(x, "x")
            told = described(x, state)  # type: ignore[arg-type]
            status = Status.WANTS_GRAD if is_src and wants_grad(x) else 0  # type: ignore[arg-type]
    call = checks.call(state, "broadcast", timeout_s, compares_site=False)
    own = as_bytes(dense(x)) if is_src and x is not None else None
    flags, header, flat = _broadcast(call, own, src, told, status)
    dtype, shape = header.dtypes[0], header.shapes[0]
    kind = state.transport.place(header.travels[0])
    placed = flat.to(device or (kind if x is None else x.device))
    return _Got(
        y=from_bytes(placed, dtype, shape),
        is_new=placed is not own,
        call=call,
        flags=flags,
        kind=kind,
    )


def _broadcast(
    call: Call, own: torch.Tensor | None, src: int, told: bytes, status: int
) -> tuple[int, TransferHeader, torch.Tensor]:
    """Agree, and send `own` bytes of the source; return them, and what they are."""
    rank, size = call.state.rank, call.state.size
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    host = nothing if own is None or not on_host(call.state, own.device) else own.cpu()
    found: list[tuple[TransferHeader, torch.Tensor]] = []

    def place(agreed: Agreed) -> list[torch.Tensor]:
        header = _one_header(call, [TransferHeader.unpack(part) for part in agreed.parts], src)
        length, kind = num_bytes(header.dtypes[0], header.shapes[0]), header.travels[0]
        flat = host
        if kind != "cpu" or own is None:
            where = call.state.transport.place(kind)
            flat = torch.empty(length, dtype=torch.uint8, device=where) if own is None else own
        found.append((header, flat))
        return [nothing] * size if kind != "cpu" else from_source(flat, rank, src, size)

    agreed = call.exchange(to_each(host, size), place, parts=[told] * size, status=status)
    header, flat = found[0]
    if header.travels[0] == "cpu":
        share(call, flat, src)
    else:
        flat = flat.to(call.state.transport.place(header.travels[0]))
        broadcast_bytes(call, flat, src)
    return agreed.flags, header, flat if own is None else own


def _attach(x: torch.Tensor | None, y: torch.Tensor, got: _Got) -> torch.Tensor:
    source_device, kind = None if x is None else x.device, got.kind

    def back(grads: Gradients, call: Call) -> Gradients:
        total = reduce_plain(call, grads[0].to(kind), "sum")
        return () if source_device is None else (total.to(source_device),)

    inputs = () if x is None else (x,)
    return attach(inputs, (y,), got.call, Back(run=back))[0]


def _one_header(call: Call, headers: Sequence[TransferHeader | None], src: int) -> TransferHeader:
    """Return what the source's tensor is, if those that receivers gave are alike."""
    source = headers[src]
    if source is None:
        raise MismatchError(f"{call}: something else arrived; the ranks make different calls")
    ranks = call.state.ranks
    for rank, header in enumerate(headers):
        if header is not None and (header.dtypes, header.shapes) != (source.dtypes, source.shapes):
            raise MismatchError(
                f"{call}: x of rank {ranks[rank]} is {header} but that of the source, "
                f"rank {ranks[src]}, is {source}; make them equal, or give None to "
                f"receive (at {call.site.text})"
            )
    return source

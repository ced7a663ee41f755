"""One tensor from one rank to another, and its gradient back.

The receiver need not know dtype or shape: they travel ahead. Raw gloo refuses a strided tensor on
the sender, whose peer sees a closed connection, and has no gradients here.

The gradient of what was sent comes from the receiver's backward. On the sender it needs a place in
the backward, so `send` returns a token: an empty tensor to be added to the loss.

    token = send(hidden, dst=1)                    # on rank 0
    (token.sum() + other_losses).backward()        # receives the gradient of hidden
    hidden = recv(src=0)                           # on rank 1
    loss(hidden).backward()                        # sends it
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack, cast, final, overload
from weakref import ref

import torch
from torch.autograd.function import once_differentiable

from comm_collectives._torch_private import graph_break, watch_failed_backwards
from comm_collectives.base import check_dense, new_tensor
from comm_collectives.base.transport import TransferFlag
from comm_collectives.call.autograd import tell_of_failure, wants_grad
from comm_collectives.call.groups import Group
from comm_collectives.call.handles import CallLater, CallNow, Handle, launch_on, put_in_graph
from comm_collectives.call.pairs import Lane, Transfer
from comm_collectives.collectives import Device, checked_device
from comm_collectives.errors import MismatchError
from comm_collectives.p2p.tensors import lane_to


@overload
def send(x: torch.Tensor, *, dst: int, **options: Unpack[CallNow]) -> torch.Tensor: ...
@overload
def send(x: torch.Tensor, *, dst: int, **options: Unpack[CallLater]) -> Handle[torch.Tensor]: ...
@graph_break
def send(
    x: torch.Tensor,
    *,
    dst: int,
    group: Group | None = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Send a tensor to rank `dst` of the group, which calls `recv`.

    Not collective: only this rank and `dst`. Returns when `x` may be changed, which for a large
    tensor is when the receiver has it; two ranks that send to each other first need `async_op`.

    Differentiable if `x` needs a gradient: the token's backward receives it, zeros if the receiver
    does not use what it got. It waits for the receiver's backward.

    Args:
        x: any shape, plain dtype and strides; not modified.
        dst: rank inside the group, not this one.
        group: None is the default group.
        timeout_s: limit in seconds of each wait; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the token when `x` may be changed.

    Returns:
        Token: an empty float32 tensor on the device of `x`, in whose graph `x` is.

    Raises:
        ValueError: `dst` is not another rank of the group.
        TypeError: `x` is not a dense tensor of a plain dtype.
        CommError: the transfer failed; the text names both ranks and the transfer.
    """
    check_dense(x, "x")
    state, lane, dst, timeout_s = lane_to(dst, "dst", group, timeout_s)
    wants = wants_grad(x)
    flags = TransferFlag.WANTS_GRADIENT if wants else 0
    handle = lane.send(state, "send", [x], dst, limit_s=timeout_s, flags=flags)
    token = torch.zeros(0, device=x.device)
    if wants:
        token = cast(torch.Tensor, _Sent.apply(x, handle.transfer, lane))
    if not async_op:
        handle.wait()
        return token

    def run() -> torch.Tensor:
        handle.wait()
        return token

    worker = lane.worker(dst, "to")
    handle.transfer = replace(handle.transfer, awaiting=worker.awaiting)
    return launch_on(state, worker, "send", run, inputs=[x])


@overload
def recv(*, src: int, device: Device = ..., **options: Unpack[CallNow]) -> torch.Tensor: ...
@overload
def recv(
    *, src: int, device: Device = ..., **options: Unpack[CallLater]
) -> Handle[torch.Tensor]: ...
@graph_break
def recv(
    *,
    src: int,
    group: Group | None = None,
    device: Device = None,
    timeout_s: float | None = None,
    async_op: bool = False,
) -> torch.Tensor | Handle[torch.Tensor]:
    """Receive the next tensor that rank `src` of the group sends here.

    Not collective: only this rank and `src`, which calls `send`. An asynchronous receive has a
    thread of its own for each peer, so it may wait while this rank makes other calls.

    Differentiable if the tensor needs a gradient on `src`: the backward here sends it, without
    waiting for `src` to want it. A result that is let go without a backward sends zeros; one that
    is kept without a backward leaves `src` waiting.

    Args:
        src: rank inside the group, not this one.
        group: None is the default group.
        device: where the tensor goes; None leaves it on the kind of device that it travelled on
            (the host with gloo; with nccl the current CUDA device, but the host for
            what is sent from there).
        timeout_s: limit in seconds of each wait; None is the group's own limit.
        async_op: return a Handle at once; its `wait` returns the tensor.

    Returns:
        New contiguous tensor.

    Raises:
        ValueError: `src` is not another rank of the group, or the device is unknown.
        MismatchError: a list came (here only; it is taken), or `src` waits for this rank in its
            turn (on both).
        CollectiveTimeoutError: nothing came in time.
        PeerFailedError: the peer is gone.
    """
    checked_device(device)
    state, lane, src, timeout_s = lane_to(src, "src", group, timeout_s)
    worker = lane.worker(src, "from") if async_op else None
    awaiting = None if worker is None else worker.awaiting
    ticket, transfer = lane.post(state, "recv", src, limit_s=timeout_s, awaiting=awaiting)

    def run() -> torch.Tensor:
        message = lane.take(ticket, transfer)
        if len(message.tensors) != 1:
            # The sender's part has ended well: whether it still listens is a matter of time.
            raise MismatchError(
                f"{transfer}: a list of {len(message.tensors)} tensors arrived; take what "
                "isend_tensors sends with recv_tensors"
            )
        y = message.tensors[0] if device is None else message.tensors[0].to(device)
        if not message.flags & TransferFlag.WANTS_GRADIENT:
            return y
        return _attach_sent(y, lane, replace(transfer, place=message.place))

    if worker is not None:
        return launch_on(state, worker, "recv", run, inputs=())
    return run()


def _attach_sent(y: torch.Tensor, lane: Lane, transfer: Transfer) -> torch.Tensor:
    if not torch.is_grad_enabled():
        _give_none(lane, transfer)
        return y
    lane.open_helper()
    alive = _Alive(lane, transfer)

    def make() -> tuple[torch.Tensor, ...]:
        joins = torch.zeros(0, requires_grad=True, device="cpu")
        return (cast(torch.Tensor, _Received.apply(joins, (y,), lane, transfer, alive)),)

    return put_in_graph((y,), make)[0]


def _give(lane: Lane, transfer: Transfer, grads: Sequence[torch.Tensor], flags: int = 0) -> None:
    """Send the gradient of what was received, without waiting; nothing stands for zeros."""
    name, key = "recv (backward)", transfer.place
    lane.send(transfer.state, name, grads, transfer.src, key=key, flags=flags)


def _give_none(lane: Lane, transfer: Transfer, flags: int = 0) -> None:
    _give(lane, transfer, [], flags)
    lane.pairs[transfer.src].sent.pop(transfer.place, None)


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Transfer, lane: Lane) -> torch.Tensor:
        ctx.transfer, ctx.lane = transfer, lane
        ctx.kind = x.dtype, x.shape, x.device
        ctx.wanted = _Wanted(lane, transfer)
        ctx.is_zero = False
        return torch.zeros(0, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # The receiver's gradient may depend on this rank's tensors: a derivative of it is an error.
        return _Sent.receive(ctx, grad.detach().requires_grad_())

    @staticmethod
    @once_differentiable
    def receive(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype, shape, device = ctx.kind
        if not ctx.is_zero:
            sent = ctx.transfer
            ticket, _ = ctx.lane.post(sent.state, "", sent.dst, key=sent.place)
            # Named by what was sent, and awaited under its own key.
            back = replace(sent, name="send (backward)", holds=False)
            message = ctx.lane.take(ticket, back)
            ctx.wanted.is_taken = True
            if message.flags & TransferFlag.BACKWARD_FAILED:
                raise MismatchError(
                    f"{back}: a backward pass of rank {sent.state.ranks[sent.dst]} ended in an "
                    "exception ahead of what it had received, so no gradient of that will come"
                )
            # Once for all, if the receiver does not use what it got.
            ctx.is_zero = not message.tensors
        if ctx.is_zero:
            return new_tensor(shape, dtype, device).zero_(), None, None
        return message.tensors[0].to(device), None, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joins: torch.Tensor,
        received: tuple[torch.Tensor],
        lane: Lane,
        transfer: Transfer,
        alive: "_Alive",
    ) -> torch.Tensor:
        ctx.lane, ctx.transfer, ctx.alive = lane, transfer, alive
        ctx.when_pass_fails = alive.fail
        watch_failed_backwards(tell_of_failure)
        # A tensor given as it is, or a view of what arrived, could not be changed in place.
        return received[0].data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.alive.is_used = True
        _give(ctx.lane, ctx.transfer, [grad])
        return None, None, None, None, None


@final
class _Alive:
    """Lives as long as the graph of a received tensor; without a backward its gradient is zeros,
    or nobody knows it, if one has failed."""

    def __init__(self, lane: Lane, transfer: Transfer) -> None:
        self._lane, self._transfer = lane, transfer
        self.is_used, self._flags = False, 0

    def fail(self) -> None:
        """Note that a backward pass has failed that might have come here."""
        self._flags = TransferFlag.BACKWARD_FAILED

    def __del__(self) -> None:
        lane, transfer, flags = self._lane, self._transfer, self._flags
        if self.is_used:
            lane.pairs[transfer.src].sent.pop(transfer.place, None)
        else:
            lane.later(lambda: _give_none(lane, transfer, flags))


@final
class _Wanted:
    """Lives as long as the graph of a sent tensor; after that nobody takes its gradient."""

    def __init__(self, lane: Lane, transfer: Transfer) -> None:
        self._lane, self._peer, self._place = ref(lane), transfer.dst, transfer.place
        self.is_taken = False

    def __del__(self) -> None:
        lane = self._lane()
        if lane is not None:
            pair = lane.pairs[self._peer]
            if self.is_taken:
                pair.came.pop(self._place, None)
            else:
                pair.forget(self._place)

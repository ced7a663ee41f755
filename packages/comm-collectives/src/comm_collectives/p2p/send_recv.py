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

from typing import Any, Literal, cast, final, overload
from weakref import ref

import torch
from torch.autograd.function import once_differentiable

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_dense, new_tensor
from comm_collectives.base.transport import WANTS_GRADIENT
from comm_collectives.call.autograd import wants_grad
from comm_collectives.call.groups import Group
from comm_collectives.call.handles import Handle, put_in_graph
from comm_collectives.collectives import Device, checked_device
from comm_collectives.errors import MismatchError
from comm_collectives.p2p.channel import Channel, Transfer
from comm_collectives.p2p.tensors import SendHandle, receiving, sending, take_transfer


@overload
def send(
    x: torch.Tensor,
    *,
    dst: int,
    group: Group | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def send(
    x: torch.Tensor,
    *,
    dst: int,
    group: Group | None = ...,
    timeout_s: float | None = ...,
    async_op: Literal[True],
) -> Handle[torch.Tensor]: ...
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
        timeout_s: limit in seconds of each wait; None is the group's own limit. One that passes
            is final, as gloo then closes the connection.
        async_op: return a Handle at once; its `wait` returns the token when `x` may be changed.

    Returns:
        Token: an empty float32 tensor on the device of `x`, in whose graph `x` is.

    Raises:
        ValueError: `dst` is not another rank of the group.
        TypeError: `x` is not a dense tensor of a plain dtype.
        CommError: the transfer failed; the text names both ranks and the transfer.
    """
    check_dense(x, "x")
    transfer = sending("send", dst, group, timeout_s)
    channel = Channel.of(transfer.state, dst)
    differentiable = wants_grad(x)
    flags = WANTS_GRADIENT if differentiable else 0
    handle = SendHandle(transfer, *channel.send([x], transfer, flags))
    token = torch.zeros(0, device=x.device)
    if differentiable:
        token = cast(torch.Tensor, _Sent.apply(x, transfer, channel))

    def run() -> torch.Tensor:
        handle.wait()
        return token

    return channel.launch(transfer, run, inputs=[x]) if async_op else channel.run(transfer, run)


@overload
def recv(
    *,
    src: int,
    group: Group | None = ...,
    device: Device = ...,
    timeout_s: float | None = ...,
    async_op: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def recv(
    *,
    src: int,
    group: Group | None = ...,
    device: Device = ...,
    timeout_s: float | None = ...,
    async_op: Literal[True],
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
            (the host with gloo, the current CUDA device with nccl).
        timeout_s: limit in seconds of each wait; None is the group's own limit. One that passes
            is final, as gloo then closes the connection.
        async_op: return a Handle at once; its `wait` returns the tensor.

    Returns:
        New contiguous tensor.

    Raises:
        ValueError: `src` is not another rank of the group, or the device is unknown.
        MismatchError: transfers of this direction got out of step.
        CollectiveTimeoutError: nothing came in time.
        PeerFailedError: the peer is gone.
    """
    checked_device(device)
    transfer = receiving("recv", src, group, timeout_s)
    channel = Channel.of(transfer.state, src)

    def run() -> torch.Tensor:
        message = take_transfer(channel, transfer)
        if len(message.tensors) != 1:
            raise MismatchError(
                f"{transfer}: a list of {len(message.tensors)} tensors arrived; take what "
                "isend_tensors sends with recv_tensors"
            )
        y = message.tensors[0] if device is None else message.tensors[0].to(device)
        if not message.header.flags & WANTS_GRADIENT:
            return y
        return _attach_sent(y, channel, transfer)

    return channel.launch(transfer, run, inputs=()) if async_op else channel.run(transfer, run)


def _attach_sent(y: torch.Tensor, channel: Channel, transfer: Transfer) -> torch.Tensor:
    if not torch.is_grad_enabled():
        channel.give_gradient([], transfer)
        return y
    channel.open_outbox()
    alive = _Alive(channel, transfer)

    def make() -> tuple[torch.Tensor, ...]:
        joins = torch.zeros(0, requires_grad=True, device="cpu")
        return (cast(torch.Tensor, _Received.apply(joins, y, channel, transfer, alive)),)

    return put_in_graph((y,), make)[0]


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Transfer, channel: Channel) -> torch.Tensor:
        ctx.transfer, ctx.channel = transfer, channel
        ctx.kind = x.dtype, x.shape, x.device
        ctx.wanted = _Wanted(channel, transfer.number)
        ctx.is_zero = False
        return torch.zeros(0, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dtype, shape, device = ctx.kind
        if not ctx.is_zero:
            transfer = ctx.transfer.renamed("send (backward)")
            message = ctx.channel.take(transfer, gradient=True)
            ctx.wanted.is_taken = True
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
        y: torch.Tensor,
        channel: Channel,
        transfer: Transfer,
        alive: "_Alive",
    ) -> torch.Tensor:
        ctx.channel, ctx.transfer, ctx.alive = channel, transfer, alive
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.alive.is_used = True
        ctx.channel.give_gradient([grad], ctx.transfer.renamed("recv (backward)"))
        return None, None, None, None, None


@final
class _Alive:
    """Lives as long as the graph of a received tensor; without a backward its gradient is zeros."""

    def __init__(self, channel: Channel, transfer: Transfer) -> None:
        self._channel, self._transfer = channel, transfer
        self.is_used = False

    def __del__(self) -> None:
        if not self.is_used:
            channel, transfer = self._channel, self._transfer
            channel.later(lambda: channel.give_gradient([], transfer))


@final
class _Wanted:
    """Lives as long as the graph of a sent tensor; after that nobody takes its gradient."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = ref(channel), number
        self.is_taken = False

    def __del__(self) -> None:
        channel = self._channel()
        if channel is not None and not self.is_taken:
            channel.forget(self._number)

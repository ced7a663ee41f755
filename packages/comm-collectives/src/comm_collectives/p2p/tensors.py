"""Lists of tensors from one rank to another, with their shapes, for pipeline stages.

A header travels ahead of the tensors, so shapes, dtypes and their number may change at each
transfer and may be zero. Transfers of one direction between two ranks arrive in the order in which
they were sent, and each carries its number, so that a skipped one is noticed. A limit that passes
is final: gloo closes the connection between the two ranks, so give up the group after it.

    handle = isend_tensors([hidden, position_ids], dst=1)   # on rank 0; returns at once
    expect_tensors(src=0)                                   # on rank 1, if it computes meanwhile
    hidden, position_ids = recv_tensors(src=0)              # on rank 1
    handle.wait()                                           # on rank 0, before changing the tensors
"""

from collections.abc import Sequence
from typing import final

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_tensors
from comm_collectives.base.transport import WANTS_GRADIENT, Pending
from comm_collectives.call.groups import Group, check_peer, check_timeout, group_state
from comm_collectives.collectives import Device, checked_device
from comm_collectives.errors import MismatchError
from comm_collectives.p2p.channel import Channel, Message, Transfer


@final
class SendHandle:
    """A send under way. Keep it, and leave the tensors unchanged, until `wait` has returned."""

    def __init__(
        self, transfer: Transfer, works: list[Pending], buffers: list[torch.Tensor]
    ) -> None:
        self._transfer = transfer
        self._works = works
        self._buffers = buffers

    @graph_break
    def wait(self) -> None:
        """Wait until the tensors may be changed. Not collective; may be called again.

        Raises:
            CommError: the transfer failed; the text names both ranks and the transfer.
        """
        while self._works:
            self._transfer.wait(self._works[0])
            del self._works[0]
        self._buffers.clear()


@graph_break
def isend_tensors(
    tensors: Sequence[torch.Tensor],
    *,
    dst: int,
    group: Group | None = None,
    timeout_s: float | None = None,
) -> SendHandle:
    """Start to send tensors to rank `dst` of the group; does not wait for the receiver.

    Not collective: only this rank and `dst`, which calls `recv_tensors`. Not differentiable. Inputs
    of any shape, plain dtype and strides are not modified; large contiguous ones are not copied,
    small ones travel in one message with their header.

    Args:
        tensors: any number of tensors, zero included.
        dst: rank inside the group, not this one.
        group: None is the default group.
        timeout_s: limit in seconds of each wait; None is the group's own limit.

    Raises:
        ValueError: `dst` is not another rank of the group.
        TypeError: `tensors` is no list or tuple, or an item not a dense tensor of a plain dtype.
        CommError: the peer is already known to be gone.
    """
    check_tensors(tensors)
    transfer = sending("isend_tensors", dst, group, timeout_s)
    works, buffers = Channel.of(transfer.state, dst).send(tensors, transfer)
    return SendHandle(transfer, works, buffers)


@graph_break
def recv_tensors(
    *, src: int, group: Group | None = None, device: Device = None, timeout_s: float | None = None
) -> list[torch.Tensor]:
    """Receive the next list of tensors that rank `src` of the group sends here.

    Not collective: only this rank and `src`, which calls `isend_tensors`. The tensors are new,
    contiguous, and carry no gradient history.

    Args:
        src: rank inside the group, not this one.
        group: None is the default group.
        device: where the tensors go; None leaves each on the kind of device that it travelled on
            (the host with gloo, the current CUDA device with nccl).
        timeout_s: limit in seconds of each wait; None is the group's own limit.

    Raises:
        ValueError: `src` is not another rank of the group, or the device is unknown.
        MismatchError: transfers of this direction got out of step.
        CollectiveTimeoutError: nothing came in time.
        PeerFailedError: the peer is gone.
    """
    checked_device(device)
    transfer = receiving("recv_tensors", src, group, timeout_s)
    channel = Channel.of(transfer.state, src)

    def run() -> list[torch.Tensor]:
        message = take_transfer(channel, transfer)
        if message.header.flags & WANTS_GRADIENT:
            channel.give_gradient([], transfer)
        return message.tensors

    tensors = channel.run(transfer, run)
    return [t if device is None else t.to(device) for t in tensors]


@graph_break
def expect_tensors(*, src: int, group: Group | None = None) -> None:
    """Let the next list from `src` arrive while this rank does something else.

    Without it gloo moves bytes only once `recv_tensors` is called. Not collective; call it only
    when `src` has sent a list that was not received here, or will. Has no effect on what is
    received, on a second call for the same list, and where the backend is not gloo.

    Args:
        src: rank inside the group, not this one.
        group: None is the default group.

    Raises:
        ValueError: `src` is not another rank of the group.
    """
    state = group_state(group)
    check_peer(state, src, "src")
    Channel.of(state, src).expect()


def sending(name: str, dst: int, group: Group | None, timeout_s: float | None) -> Transfer:
    """Number a transfer to `dst`.

    Raises:
        ValueError: `dst` is not another rank of the group, or the limit is not positive.
        TypeError: one of them is no number.
    """
    state = group_state(group)
    check_timeout(timeout_s)
    check_peer(state, dst, "dst")
    number = state.next_transfer(state.rank, dst)
    return Transfer(
        name=name, state=state, src=state.rank, dst=dst, number=number, limit_s=timeout_s
    )


def receiving(name: str, src: int, group: Group | None, timeout_s: float | None) -> Transfer:
    """Number a transfer from `src`.

    Raises:
        ValueError: `src` is not another rank of the group, or the limit is not positive.
        TypeError: one of them is no number.
    """
    state = group_state(group)
    check_timeout(timeout_s)
    check_peer(state, src, "src")
    number = state.next_transfer(src, state.rank)
    return Transfer(
        name=name, state=state, src=src, dst=state.rank, number=number, limit_s=timeout_s
    )


def take_transfer(channel: Channel, transfer: Transfer) -> Message:
    """Return the transfer of this number.

    Raises:
        MismatchError: another one arrived.
        CommError: nothing came in time, or the peer is gone.
    """
    message = channel.take(transfer)
    if message.header.number != transfer.number:
        raise MismatchError(
            f"{transfer}: transfer {message.header.number} arrived; an earlier call was skipped"
        )
    return message

"""Lists of tensors from one rank to another, with their shapes, for pipeline stages.

Shapes, dtypes and their number may change at each transfer and may be zero. Transfers of one
direction between two ranks arrive in the order in which they were sent.

    handle = isend_tensors([hidden, position_ids], dst=1)   # on rank 0; returns at once
    expect_tensors(src=0)                                   # on rank 1, if it computes meanwhile
    hidden, position_ids = recv_tensors(src=0)              # on rank 1
    handle.wait()                                           # on rank 0, before changing the tensors
"""

from collections.abc import Sequence
from operator import index

import torch

from comm_collectives._torch_private import graph_break
from comm_collectives.base import check_tensors
from comm_collectives.base.transport import TransferFlag
from comm_collectives.call.groups import Group, GroupState, check_peer, check_timeout, group_state
from comm_collectives.call.pairs import Lane
from comm_collectives.call.pairs import SendHandle as SendHandle
from comm_collectives.collectives import Device, checked_device


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
    of any shape, plain dtype and strides are not modified; large contiguous ones are not copied.

    Args:
        tensors: any number of tensors, zero included.
        dst: rank inside the group, not this one.
        group: None is the default group.
        timeout_s: limit in seconds of each wait; None is the group's own limit. The send goes on
            after one that passed.

    Raises:
        ValueError: `dst` is not another rank of the group.
        TypeError: `tensors` is no list or tuple, or an item not a dense tensor of a plain dtype.
        CommError: the peer cannot be reached.
    """
    check_tensors(tensors)
    state, lane, dst, timeout_s = lane_to(dst, "dst", group, timeout_s)
    return lane.send(state, "isend_tensors", tensors, dst, limit_s=timeout_s)


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
            (the host with gloo; with nccl the current CUDA device, but the host for
            what is sent from there).
        timeout_s: limit in seconds of each wait; None is the group's own limit. What comes after
            one that passed is received by the next call.

    Raises:
        ValueError: `src` is not another rank of the group, or the device is unknown.
        MismatchError: `src` waits for this rank in its turn (on both).
        CollectiveTimeoutError: nothing came in time.
        PeerFailedError: the peer is gone.
    """
    checked_device(device)
    state, lane, src, timeout_s = lane_to(src, "src", group, timeout_s)
    message = lane.take(*lane.post(state, "recv_tensors", src, limit_s=timeout_s))
    if message.flags & TransferFlag.WANTS_GRADIENT:
        lane.send(state, "recv_tensors", [], src, key=message.place)  # it is zero
        del lane.pairs[src].sent[message.place]
    return [t if device is None else t.to(device) for t in message.tensors]


@graph_break
def expect_tensors(*, src: int, group: Group | None = None) -> None:
    """Let the next list from `src` arrive while this rank does something else.

    Without it bytes move only once `recv_tensors` is called. Not collective; call it only when
    `src` has sent a list that was not received here, or will. Has no effect on what is received,
    on a second call for the same list, and where data travels on a device.

    Args:
        src: rank inside the group, not this one.
        group: None is the default group.

    Raises:
        ValueError: `src` is not another rank of the group.
    """
    state, lane, src, _ = lane_to(src, "src", group, None)
    if state.moves_on_host:
        lane.expect(src)


def lane_to(
    peer: int, name: str, group: Group | None, timeout_s: float | None
) -> tuple[GroupState, Lane, int, float | None]:
    """Return what a transfer with a peer, which an argument names, goes by; both as plain numbers.

    Raises:
        ValueError: it is not another rank of the group, or the limit is not positive.
        TypeError: one of them is no number.
    """
    state = group_state(group)
    limit_s = check_timeout(timeout_s)
    check_peer(state, peer, name)
    return state, Lane.of(state, uses=True), index(peer), limit_s

"""Torch's transfers between two ranks: any dtype, strides on both sides, tags, and from any source.

They go over the group's `Lane`, so both ends have to use these functions; what travels on a device
goes as raw bytes, without a message ahead. The receiver compares dtype and number of elements, and
alone raises: a send has ended by then, since the whole message is taken before, so that the next
one is right.

    isend(tensor, dst=1, tag=7)                # on rank 0
    recv(tensor, tag=7)                        # on rank 1, from any source: returns 0
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from comm_collectives._torch_private import graph_break
from comm_collectives.base import as_bytes, check_dense, dense, from_bytes
from comm_collectives.base.transport import Pending
from comm_collectives.call.groups import Group, GroupState, check_integer, group_state
from comm_collectives.call.handles import Awaiting, Worker, launch_on
from comm_collectives.call.pairs import ANY_RANK, Lane, Message, SendHandle, Transfer
from comm_collectives.collectives.drop_in.in_place import check_written, write
from comm_collectives.collectives.drop_in.moves import rank_of
from comm_collectives.collectives.drop_in.works import CallWork, is_outside
from comm_collectives.errors import CommValueError, MismatchError


@final
class SendWork(dist.Work):
    """A send under way, on the host or on a device, and what it reads."""

    def __init__(self, sent: SendHandle | Pending, kept: torch.Tensor) -> None:
        super().__init__()
        self._sent, self._kept = sent, kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the tensor may be changed; zero waits for as long as the group's limit."""
        if isinstance(self._sent, SendHandle):
            self._sent.transfer = replace(
                self._sent.transfer, limit_s=timeout.total_seconds() or None
            )
            self._sent.wait()
        else:
            self._sent.wait(*[timeout] if timeout else [])
        return True

    def is_completed(self) -> bool:
        """Whether the tensor may be changed."""
        if isinstance(self._sent, SendHandle):
            return self._sent.is_done()
        return self._sent.is_completed()


class _Source:
    """Who sent what was received; its thread ends with it."""

    rank = ANY_RANK


@graph_break
def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> dist.Work | None:
    """Start to send a tensor, which the destination takes with `recv` or `irecv` of the same tag.

    Args:
        tensor: any shape, plain dtype and strides; not to be changed before `wait` has returned.
        dst: global rank of the destination.
        group: None is the default group.
        tag: what the receiver asks for, at least 0.
        group_dst: the destination's rank inside the group, instead of `dst`.

    Raises:
        ValueError, TypeError: the destination or the tag is none, or the tensor is not dense.
    """
    if is_outside("isend", group):
        return None
    state = group_state(group)
    check_dense(tensor, "tensor")
    _check_tag(tag)
    peer = _peer(state, "dst", dst, group_dst)
    if state.transport_type(tensor.device) == "cpu":
        lane = Lane.of(state, uses=True)
        return SendWork(lane.send(state, "send", [tensor], peer, key=_key(tag)), tensor)
    flat = as_bytes(dense(tensor))
    work = state.transport.send(flat, peer)
    return None if work is None else SendWork(work, flat)


@graph_break
def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """As `isend`, until the tensor may be changed."""
    work = isend(tensor, dst, group, tag, group_dst)
    if work is not None:
        work.wait()


@graph_break
def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> CallWork | None:
    """Start to receive into a tensor what a rank sends with `send` or `isend` of the same tag.

    Args:
        tensor: any plain dtype and strides, as many elements as are sent; written.
        src: global rank of the source; None, also of `group_src`, is any. The Work's `source_rank`
            says, inside the group, who it was.
        group: None is the default group.
        tag: that of the sender.
        group_src: the source's rank inside the group, instead of `src`.

    Raises:
        ValueError, TypeError: the source or the tag is none, or the tensor cannot be written.
        MismatchError: (by `wait`) the tensors of both ends differ in dtype or size.
    """
    if is_outside("irecv", group):
        return None
    state, source = group_state(group), _Source()
    # A thread for each, since what comes of one may wait for another.
    worker = Worker("comm_collectives irecv", source) if state.hire is None else state.hire()
    take = _receiving(tensor, state, (src, group_src), tag, worker.awaiting)

    def run() -> None:
        source.rank = take()

    handle = launch_on(state, worker, "irecv", run, inputs=())
    return CallWork(handle, [tensor], lambda: source.rank)


@graph_break
def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """As `irecv`, until the tensor is written; returns the global rank of the sender."""
    if is_outside("recv", group):
        return -1
    state = group_state(group)
    return state.ranks[_receiving(tensor, state, (src, group_src), tag, None)()]


def _check_tag(tag: int) -> None:
    check_integer(tag, "tag")
    if not 0 <= tag < 1 << 63:
        raise CommValueError(f"tag={tag} must be at least 0 and below 2**63")


def _peer(state: GroupState, name: str, peer: int | None, group_peer: int | None) -> int:
    found = rank_of(state, name, peer, group_peer, None)
    if found == state.rank:
        raise CommValueError(
            f"{name}={state.global_rank} is this rank itself; give another rank, and copy a tensor "
            "that stays here"
        )
    return found


def _key(tag: int) -> int:
    """The key of a tag; those of other transfers are not negative."""
    return -1 - tag


def _receiving(
    tensor: torch.Tensor,
    state: GroupState,
    src: tuple[int | None, int | None],
    tag: int,
    awaiting: Awaiting | None,
) -> Callable[[], int]:
    """Begin to receive, in the order of the calls; return what ends it and says who sent."""
    check_written(tensor)
    _check_tag(tag)
    source = ANY_RANK if src == (None, None) else _peer(state, "src", *src)
    if state.transport_type(tensor.device) != "cpu":
        flat = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        work = state.transport.recv(flat, source)
        if work is None:
            raise CommValueError(
                "a receive among calls that torch gathers has no end of its own; receive after "
                "them, or under patched_torch() with torch.distributed.irecv"
            )

        def end() -> int:
            work.wait()
            write(tensor, from_bytes(flat, tensor.dtype, tensor.shape))
            return source

        return end
    lane = Lane.of(state, uses=True)
    ticket, transfer = lane.post(state, "recv", source, key=_key(tag), awaiting=awaiting)

    def run() -> int:
        message = lane.take(ticket, transfer)
        _write_message(tensor, message, transfer)
        return message.source

    return run


def _write_message(tensor: torch.Tensor, message: Message, transfer: Transfer) -> None:
    (x,) = message.tensors
    if (x.dtype, x.numel()) != (tensor.dtype, tensor.numel()):
        raise MismatchError(
            f"{transfer}: {x.numel()} elements of {x.dtype} came from rank {message.source} of the "
            f"group, for a tensor of {tensor.numel()} of {tensor.dtype}; make them equal"
        )
    write(tensor, x)

"""Lists of tensors from one rank to another, with their shapes, for pipeline stages.

A header travels ahead of the tensors, so shapes, dtypes and their number may change at each
transfer and may be zero. Transfers of one direction between two ranks arrive in the order in which
they were sent, and each carries its number, so that a skipped one is noticed. A limit that passes
is final: gloo closes the connection between the two ranks, so give up the group after it.

    handle = isend_tensors([hidden, position_ids], dst=1)   # on rank 0; returns at once
    hidden, position_ids = recv_tensors(src=0)              # on rank 1
    handle.wait()                                           # on rank 0, before changing the tensors
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist

from comm_collectives.calls import classify, first_line, wait_for
from comm_collectives.errors import CommError, MismatchError
from comm_collectives.groups import GroupState, check_peer, check_timeout, group_state
from comm_collectives.header import FIRST_WORDS, TransferHeader
from comm_collectives.wire import as_bytes, check_dense, dense, from_bytes, num_bytes


@final
class SendHandle:
    """A send under way. Keep it, and leave the tensors unchanged, until `wait` has returned."""

    __slots__ = ("_buffers", "_transfer", "_works")

    def __init__(
        self, transfer: "_Transfer", works: list[dist.Work], buffers: list[torch.Tensor]
    ) -> None:
        self._transfer = transfer
        self._works = works
        self._buffers = buffers

    def wait(self) -> None:
        """Wait until the tensors may be changed. Not collective; may be called again.

        Raises:
            CommError: the transfer failed; the text names both ranks and the transfer.
        """
        while self._works:
            self._transfer.wait(self._works[0])
            del self._works[0]
        self._buffers.clear()


def isend_tensors(
    tensors: Sequence[torch.Tensor],
    *,
    dst: int,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> SendHandle:
    """Start to send tensors to rank `dst` of the group; does not wait for the receiver.

    Not collective: only this rank and `dst`, which calls `recv_tensors`. Not differentiable. Inputs
    of any shape, plain dtype and strides are not modified; contiguous ones are not copied.

    Args:
        tensors: any number of tensors, zero included.
        dst: rank inside the group, not this one.
        group: None is the default group.
        timeout_s: limit in seconds of each wait; None is the group's own limit.

    Raises:
        ValueError: `dst` is not another rank of the group.
        TypeError: an item is not a dense tensor of a plain dtype.
        CommError: the peer is already known to be gone.
    """
    resolved, state = group_state(group)
    check_timeout(timeout_s)
    check_peer(state, dst, "dst")
    for i, tensor in enumerate(tensors):
        check_dense(tensor, f"tensors[{i}]")
    number = state.next_transfer(state.rank, dst)
    transfer = _Transfer(
        name="isend_tensors", state=state, src=state.rank, dst=dst, number=number, limit_s=timeout_s
    )
    header = TransferHeader.describe(
        tensors, number, [state.transport_type(t.device) for t in tensors]
    )
    buffers = [words.to(state.control_type) for words in header.to_messages()]
    for tensor, kind in zip(tensors, header.travels, strict=True):
        if tensor.numel():
            payload = as_bytes(dense(tensor))
            buffers.append(payload if payload.device.type == kind else payload.to(kind))
    works: list[dist.Work] = []
    try:
        for buffer in buffers:
            work = dist.isend(buffer, group=resolved, group_dst=dst)
            if work is not None:
                works.append(work)
    except RuntimeError as error:
        raise transfer.explain(error) from error
    return SendHandle(transfer, works, buffers)


def recv_tensors(
    *,
    src: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
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
        ValueError: `src` is not another rank of the group.
        MismatchError: transfers of this direction got out of step.
        CollectiveTimeoutError: nothing came in time.
        PeerFailedError: the peer is gone.
    """
    resolved, state = group_state(group)
    check_timeout(timeout_s)
    check_peer(state, src, "src")
    number = state.next_transfer(src, state.rank)
    transfer = _Transfer(
        name="recv_tensors", state=state, src=src, dst=state.rank, number=number, limit_s=timeout_s
    )

    def receive(buffer: torch.Tensor) -> torch.Tensor:
        try:
            work = dist.irecv(buffer, group=resolved, group_src=src)
            if work is not None:
                transfer.wait(work)
        except CommError:
            raise
        except RuntimeError as error:
            raise transfer.explain(error) from error
        return buffer

    words = receive(_empty_words(FIRST_WORDS, state)).tolist()
    rest = TransferHeader.words_to_come(words)
    if rest:
        words += receive(_empty_words(rest, state)).tolist()
    header = TransferHeader.from_words(words)
    if header is None or header.number != number:
        found = "no header" if header is None else f"transfer {header.number}"
        raise MismatchError(f"{transfer.name_it()}: {found} arrived; an earlier call was skipped")
    tensors = []
    for dtype, shape, kind in zip(header.dtypes, header.shapes, header.travels, strict=True):
        flat = torch.empty(num_bytes(dtype, shape), dtype=torch.uint8, device=kind)
        if flat.numel():
            receive(flat)
        tensor = from_bytes(flat, dtype, shape)
        tensors.append(tensor if device is None else tensor.to(device))
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    name: str
    state: GroupState
    src: int
    dst: int
    number: int
    limit_s: float | None

    def wait(self, work: dist.Work) -> None:
        try:
            wait_for(work, self.limit_s)
        except RuntimeError as error:
            raise self.explain(error) from error

    def explain(self, error: RuntimeError) -> CommError:
        kind, what = classify(error, self.limit_s)
        peer = self.src if self.dst == self.state.rank else self.dst
        missing = (
            "" if kind is CommError else f"; rank {self.state.ranks[peer]} did not do its part"
        )
        return kind(f"{self.name_it()} {what}{missing}. Cause: {first_line(error)}")

    def name_it(self) -> str:
        ranks = self.state.ranks
        return (
            f"rank {self.state.global_rank}: {self.name}, transfer {self.number} from rank "
            f"{ranks[self.src]} to rank {ranks[self.dst]} of group {ranks}"
        )


def _empty_words(count: int, state: GroupState) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int64, device=state.control_type)

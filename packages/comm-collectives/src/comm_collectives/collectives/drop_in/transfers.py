"""Torch's transfers between two ranks: any dtype, strides on both sides, tags, and from any source.

A message of one size goes ahead. It says dtype and number of elements, which the receiver
compares, and holds small data itself; larger data follows under a tag of its own, so that transfers
of one tag cannot take each other's. So both ends have to use these functions. What travels on a
device goes as raw bytes, without a message ahead.

    isend(tensor, dst=1, tag=7)                # on rank 0
    recv(tensor, tag=7)                        # on rank 1, from any source: returns 0
"""

import struct
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives._torch_private import graph_break, raw_torch
from comm_collectives.base import DTYPES, as_bytes, dense, dtype_code, from_bytes, new_tensor
from comm_collectives.call.groups import Group, GroupState, group_state
from comm_collectives.call.handles import Worker, launch_on
from comm_collectives.collectives.drop_in.in_place import write
from comm_collectives.collectives.drop_in.moves import problem_in_place, rank_of
from comm_collectives.collectives.drop_in.works import CallWork, is_outside
from comm_collectives.errors import CommValueError, MismatchError

_AHEAD = struct.Struct("<8s3q")  # mark, dtype, elements, tag of the data (0: it is here)
_MARK, _AHEAD_BYTES = b"drop-in1", 1024
_FIRST_TAG = 1 << 29  # of data; smaller ones are the user's
_NUMBERS = count()


@final
class SendWork(dist.Work):
    """A send under way: torch's works, and what they read."""

    def __init__(self, works: list[Any], kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._kept = works, kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the tensor may be changed; zero waits for as long as the group's limit."""
        for work in self._works:
            work.wait(*[timeout] if timeout else [])
        return True

    def is_completed(self) -> bool:
        """Whether the tensor may be changed."""
        return all(work.is_completed() for work in self._works)


@graph_break
def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> SendWork | None:
    """Start to send a tensor, which the destination takes with `recv` or `irecv` of the same tag.

    Args:
        tensor: any shape, plain dtype and strides; not to be changed before `wait` has returned.
        dst: global rank of the destination.
        group: None is the default group.
        tag: what the receiver asks for; 0 <= tag < 2^29.
        group_dst: the destination's rank inside the group, instead of `dst`.

    Raises:
        ValueError, TypeError: the destination or the tag is none, or the tensor is not dense.
    """
    if is_outside("isend", group):
        return None
    state = group_state(group)
    _check_transfer(tensor, tag)
    peer = rank_of(state, "dst", dst, group_dst, None)
    messages = [(as_bytes(dense(tensor)), tag)]
    if _goes_by_host(tensor, state):
        messages = _messages(tensor, tag)
    works = [_torchs_isend(data, group, peer, under) for data, under in messages]
    return SendWork(works, [data for data, _ in messages])


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
    state = group_state(group)
    run, source = _receiving(tensor, state, group, (src, group_src), tag)
    # A thread for each, since what comes of one may wait for another.
    handle = launch_on(Worker("comm_collectives irecv", run), "irecv", run, inputs=())
    return CallWork(handle, [tensor], source)


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
    run, source = _receiving(tensor, state, group, (src, group_src), tag)
    run()
    return state.ranks[source()]


def _check_transfer(tensor: torch.Tensor, tag: int) -> None:
    problem = problem_in_place(tensor)
    if problem is not None:
        raise problem
    if not 0 <= tag < _FIRST_TAG:
        raise CommValueError(f"tag={tag} must be at least 0 and below {_FIRST_TAG}")


def _goes_by_host(tensor: torch.Tensor, state: GroupState) -> bool:
    return state.transport_type(tensor.device) == "cpu"


def _messages(tensor: torch.Tensor, tag: int) -> list[tuple[torch.Tensor, int]]:
    """Return the message ahead and, if that does not hold it, the data, each with its tag."""
    data = as_bytes(dense(tensor)).cpu()
    is_small = data.numel() <= _AHEAD_BYTES - _AHEAD.size
    under = 0 if is_small else _FIRST_TAG + next(_NUMBERS) % _FIRST_TAG
    words = _AHEAD.pack(_MARK, dtype_code(tensor.dtype), tensor.numel(), under)
    ahead = torch.zeros(_AHEAD_BYTES, dtype=torch.uint8)
    ahead[: _AHEAD.size] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    if is_small:
        ahead[_AHEAD.size : _AHEAD.size + data.numel()] = data
        return [(ahead, tag)]
    return [(ahead, tag), (data, under)]


def _receiving(
    tensor: torch.Tensor,
    state: GroupState,
    group: Group | None,
    src: tuple[int | None, int | None],
    tag: int,
) -> tuple[Callable[[], None], Callable[[], int]]:
    """Begin to receive; return what ends it and what then says who sent, inside the group."""
    _check_transfer(tensor, tag)
    found = [-1] if src == (None, None) else [rank_of(state, "src", *src, None)]
    by_host = _goes_by_host(tensor, state)
    size = _AHEAD_BYTES if by_host else tensor.nbytes
    first = torch.empty(size, dtype=torch.uint8, device="cpu" if by_host else tensor.device)
    # Here, so that receives take what comes in the order of the calls.
    work = _torchs_irecv(first, group, found[0], tag)

    def run() -> None:
        work.wait()
        if found[0] < 0:
            found[0] = work._source_rank()
        data = _data_behind(first, tensor, group, found[0]) if by_host else first
        write(tensor, from_bytes(data, tensor.dtype, tensor.shape))

    return run, lambda: found[0]


def _data_behind(
    ahead: torch.Tensor, tensor: torch.Tensor, group: Group | None, src: int
) -> torch.Tensor:
    """Return what is sent: with the message ahead, or now. Compares it with the tensor for it."""
    mark, code, elements, tag = _AHEAD.unpack_from(_bytes_of_ahead(ahead))
    if mark != _MARK:
        raise MismatchError(
            f"recv from rank {src} of the group: something else came; use the same functions on "
            "both ends (patched_torch() on every rank)"
        )
    size = elements * DTYPES[code].itemsize
    if not tag:
        data = new_tensor((size,), torch.uint8, "cpu")  # where any dtype may begin
        data.copy_(ahead[_AHEAD.size : _AHEAD.size + size])
    else:
        data = torch.empty(size, dtype=torch.uint8)
        _torchs_irecv(data, group, src, tag).wait()
    if (DTYPES[code], elements) != (tensor.dtype, tensor.numel()):
        raise MismatchError(
            f"recv from rank {src} of the group: {elements} elements of {DTYPES[code]} came, for a "
            f"tensor of {tensor.numel()} of {tensor.dtype}; make them equal"
        )
    return data


def _bytes_of_ahead(ahead: torch.Tensor) -> bytes:
    return bytes(ahead[: _AHEAD.size].tolist())


@raw_torch
def _torchs_isend(flat: torch.Tensor, group: Any, dst: int, tag: int) -> Any:
    return dist.isend(flat, group=group, group_dst=dst, tag=tag)


@raw_torch
def _torchs_irecv(flat: torch.Tensor, group: Any, src: int, tag: int) -> Any:
    """Receive from a rank of the group, or from any for -1."""
    if src < 0:
        return dist.irecv(flat, group=group, tag=tag)
    return dist.irecv(flat, group=group, group_src=src, tag=tag)

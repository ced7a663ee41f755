"""Rows that ranks hold apart: the transfers under gathers, scatters, reductions, their gradients.

A tensor that all ranks hold is cut into one piece per rank; each rank receives its piece of
everybody's tensor, works on it, and the results are gathered. Nothing here has gradients of its
own, and but for `meet_rows` no control exchange either: counts are known to all ranks.

    rows = exchange_pieces(call, x, splits)        # [ranks, splits[rank], ...]: this rank's piece
    whole = gather_rows(call, rows.sum(0), splits)
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.base import as_bytes, bytes_of, check_dense, dense, new_tensor, num_bytes
from comm_collectives.base.transport import TransferHeader
from comm_collectives.call import Call, first_line
from comm_collectives.call.groups import GroupState, wire_device_argument
from comm_collectives.call.signature import INLINE_BYTES, Argument, Status
from comm_collectives.collectives.alltoall import exchange_bytes, exchange_rows
from comm_collectives.errors import CommValueError

Device = torch.device | str | None
_COUNT = struct.Struct("<q")
_ROOM_BYTES = INLINE_BYTES - _COUNT.size
_MOST_PADDING = 4  # pieces are padded to one size if that adds at most a quarter


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsMet:
    """What a control exchange told of the rows of all ranks.

    Attributes:
        flags: those of all ranks.
        counts: rows by rank.
        parts: the bytes of the rows by rank, if all were small enough to come along.
    """

    flags: int
    counts: tuple[int, ...]
    parts: list[bytes] | None


def check_rows(x: torch.Tensor, what: str) -> None:
    """Check that `x` is a dense tensor with rows.

    Raises:
        TypeError: it is not a tensor, or not dense.
        ValueError: it has no dims.
    """
    check_dense(x, "x")
    if x.dim() == 0:
        raise CommValueError(f"x has no dims; {what} works along dim 0, so give x.reshape(1)")


def row_arguments(state: GroupState, x: torch.Tensor) -> tuple[Argument, ...]:
    """Return what ranks agree on when they differ in the number of rows alone."""
    return (
        Argument.of_dtype(x.dtype),
        Argument.of_shape("row shape", x.shape[1:]),
        wire_device_argument(state, x.device),
    )


def checked_device(device: Device) -> torch.device | None:
    """Return the device with its index.

    Raises:
        ValueError: this rank does not have it.
    """
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: torch without CUDA
        raise CommValueError(
            f"device={device!r} cannot be used on this rank ({first_line(error)}); "
            "give one that it has, or None"
        ) from error


def describe_each(
    tensors: Sequence[torch.Tensor], state: GroupState, *, with_data: bool
) -> tuple[int, list[bytes]]:
    """Return a part for each dense tensor that says what it is, and flags for the exchange.

    With data that is small enough for all of them, the parts hold it, and the flags have INLINE.

    Raises:
        ValueError: a tensor has too many dims to be described.
    """
    headers = []
    for tensor in tensors:
        kind = state.transport_type(tensor.device)
        headers.append(TransferHeader.describe([tensor], 0, [kind]).pack())
        if len(headers[-1]) > INLINE_BYTES:
            raise CommValueError(f"a tensor has {tensor.dim()} dims; at most 40 can be described")
    fits = with_data and all(
        state.carries_inline(tensor.device) and len(header) + tensor.nbytes <= INLINE_BYTES
        for header, tensor in zip(headers, tensors, strict=True)
    )
    if not fits:
        return 0, headers
    data = [bytes_of(as_bytes(dense(tensor))) for tensor in tensors]
    return Status.INLINE, [a + b for a, b in zip(headers, data, strict=True)]


def meet_rows(
    call: Call,
    x: torch.Tensor,
    *,
    status: int,
    refused: ValueError | TypeError | None,
    readers: Sequence[int],
) -> RowsMet:
    """Meet and tell how many rows each rank has; small ones come along to `readers`. Collective.

    `readers` are ranks inside the group, the same on every rank; their frames carry the rows.
    """
    if refused is not None:
        call.meet(parts=[b""] * call.state.size, refused=refused)
    x = dense(x)
    row_bytes = num_bytes(x.dtype, x.shape[1:])
    head, payload = _COUNT.pack(len(x)), b""
    comes_along = call.state.carries_inline(x.device)
    if comes_along and x.nbytes <= _ROOM_BYTES:
        payload = bytes_of(as_bytes(x))
    parts = [head + payload if r in readers else head for r in range(call.state.size)]
    agreed = call.meet(parts=parts, status=status)
    counts = tuple(_COUNT.unpack_from(part)[0] for part in agreed.parts)
    ends = [_COUNT.size + n * row_bytes for n in counts]
    told = [part[_COUNT.size : end] for part, end in zip(agreed.parts, ends, strict=True)]
    small = comes_along and max(ends) <= INLINE_BYTES
    return RowsMet(flags=agreed.flags, counts=counts, parts=told if small else None)


def even_splits(rows: int, size: int) -> tuple[int, ...]:
    """Split rows as evenly as possible."""
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


def exchange_pieces(call: Call, x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Send piece r of a contiguous `x` to rank r; return [ranks, own rows, ...], by source."""
    own = splits[call.state.rank]
    rows = new_tensor((call.state.size, own, *x.shape[1:]), x.dtype, x.device)
    received = [own] * call.state.size
    exchange_rows(call, x, splits, received, rows.flatten(0, 1))
    return rows


def return_pieces(call: Call, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Send row r of contiguous [ranks, own rows, ...] to rank r: what `exchange_pieces` undoes."""
    own = splits[call.state.rank]
    x = new_tensor((sum(splits), *rows.shape[2:]), rows.dtype, rows.device)
    sent = [own] * call.state.size
    exchange_rows(call, rows.flatten(0, 1), sent, splits, x)
    return x


def gather_rows(
    call: Call, x: torch.Tensor, counts: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows of all ranks, by rank; `x` is contiguous and has `counts[rank]` of them.

    They are in `out`, if that is given: contiguous, with room for them.
    """
    row_shape = x.shape[1:]
    row_bytes = num_bytes(x.dtype, row_shape)
    if out is None:
        out = new_tensor((sum(counts), *row_shape), x.dtype, x.device)
    _gather_bytes(call, as_bytes(x), [n * row_bytes for n in counts], as_bytes(out))
    return out


def send_to_one(
    call: Call, x: torch.Tensor, counts: Sequence[int], dst: int, out: torch.Tensor
) -> None:
    """Send the rows of each rank to rank `dst`; `out` is [sum(counts), ...] there, else empty."""
    rank, size = call.state.rank, call.state.size
    sent = [counts[rank] if r == dst else 0 for r in range(size)]
    exchange_rows(call, x, sent, list(counts) if rank == dst else [0] * size, out)


def send_from_one(
    call: Call, flat: torch.Tensor, sizes: Sequence[int], src: int, out: torch.Tensor
) -> None:
    """Send `sizes[r]` bytes from rank `src` to rank r; flat uint8, `flat` is empty elsewhere."""
    rank, size = call.state.rank, call.state.size
    received = [sizes[rank] if r == src else 0 for r in range(size)]
    exchange_bytes(call, flat, list(sizes) if rank == src else [0] * size, received, out)


def broadcast_bytes(call: Call, flat: torch.Tensor, root: int) -> None:
    """Broadcast a flat uint8 tensor in place; it lies where the group's bytes travel."""
    state = call.state
    if state.size > 1 and flat.numel():
        call.run(lambda: state.transport.broadcast(flat, root), on_cpu=flat.device.type == "cpu")


def _gather_bytes(
    call: Call, source: torch.Tensor, sizes: Sequence[int], target: torch.Tensor
) -> None:
    state = call.state
    travel = state.transport_type(source.device)
    place = target
    if travel != source.device.type:
        source, place = source.to(travel), torch.empty_like(target, device=travel)
    pieces = list(place.split(list(sizes)))
    if state.size == 1:
        place.copy_(source)
    elif min(sizes) == max(sizes):
        if place.numel():
            call.run(lambda: state.transport.all_gather(place, source), on_cpu=travel == "cpu")
    elif max(sizes) * state.size <= sum(sizes) + sum(sizes) // _MOST_PADDING:
        _gather_padded(call, source, pieces, max(sizes))
    else:
        pieces[state.rank].copy_(source)
        for root, piece in enumerate(pieces):
            broadcast_bytes(call, piece, root)
    if place is not target:
        target.copy_(place)


def _gather_padded(
    call: Call, source: torch.Tensor, pieces: Sequence[torch.Tensor], width: int
) -> None:
    """Gather pieces of nearly one size in one operation."""
    state = call.state
    sent = torch.empty(width, dtype=torch.uint8, device=source.device)
    sent[: source.numel()] = source
    received = torch.empty(width * state.size, dtype=torch.uint8, device=source.device)
    call.run(lambda: state.transport.all_gather(received, sent), on_cpu=source.device.type == "cpu")
    for piece, row in zip(pieces, received.split(width), strict=True):
        piece.copy_(row[: piece.numel()])

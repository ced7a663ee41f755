"""Rows that ranks hold apart: the transfers under gathers, scatters, reductions, their gradients.

Nothing here has gradients of its own, and but for `meet_rows` all counts are known to all ranks.

    rows = exchange_pieces(call, x, splits)        # [ranks, splits[rank], ...]: this rank's piece
    whole = gather_rows(call, rows.sum(0), splits)
"""

from collections.abc import Sequence

import torch

from comm_collectives.base import as_bytes, check_dense, dense, new_tensor, num_bytes
from comm_collectives.base.transport import TransferHeader
from comm_collectives.call import Agreed, Call, pack_counts, unpack_counts
from comm_collectives.call.groups import GroupState, wire_device_argument
from comm_collectives.call.signature import Argument
from comm_collectives.collectives.exchange import (
    exchange_bytes,
    exchange_rows,
    observe,
    on_host,
    run_on_device,
    show,
)
from comm_collectives.errors import CommValueError, first_line

Device = torch.device | str | None
_SHARED_BYTES = 1 << 18  # of a broadcast, whose source else sends all of it to each rank
_MOST_PADDING = 4  # pieces are padded to one size if that adds at most a quarter


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


def described(x: torch.Tensor, state: GroupState) -> bytes:
    """Return what a dense tensor is, to be told to ranks that do not know it."""
    return TransferHeader.describe([x], [state.transport_type(x.device)]).pack()


def meet_rows(
    call: Call,
    x: torch.Tensor,
    *,
    status: int,
    readers: Sequence[int],
    out: torch.Tensor | None = None,
) -> tuple[int, tuple[int, ...], torch.Tensor]:
    """Tell how many rows each rank has, and send them to `readers`. Collective.

    `readers` are ranks inside the group, the same on every rank. The rows are put into `out`, if
    that is given: contiguous, with room for them.

    Returns:
        The flags of all ranks, rows by rank, and the rows of all; none where this rank reads not.
    """
    x, state = dense(x), call.state
    flat = as_bytes(x)
    made: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def room(agreed: Agreed) -> torch.Tensor:
        counts = tuple(unpack_counts(part)[0] for part in agreed.parts)
        rows = sum(counts) if state.rank in readers else 0
        y = new_tensor((rows, *x.shape[1:]), x.dtype, x.device) if out is None else out
        made.append((y, counts))
        return as_bytes(y)

    parts = [pack_counts([len(x)])] * state.size
    if on_host(state, x.device):
        host, nothing = flat.cpu(), flat.new_empty(0, device="cpu")
        shown = [host if r in readers else nothing for r in range(state.size)]
        agreed, _ = show(call, shown, room, parts=parts, status=status)
        observe(call, [piece.numel() for piece in shown])
    else:
        agreed = call.meet(parts=parts, status=status)
        y = room(agreed)
        sizes = [n * num_bytes(x.dtype, x.shape[1:]) for n in made[0][1]]
        if len(readers) == state.size:
            _gather_on_device(call, flat, sizes, y)
        else:
            send_to_one(call, flat, sizes, readers[0], y)
    y, counts = made[0]
    return agreed.flags, counts, y


def even_splits(rows: int, size: int) -> tuple[int, ...]:
    """Split rows as evenly as possible."""
    return tuple(rows // size + (rank < rows % size) for rank in range(size))


def exchange_pieces(
    call: Call, x: torch.Tensor, splits: Sequence[int], *, status: int = 0
) -> tuple[int, torch.Tensor]:
    """Send piece r of a contiguous `x` to rank r; return all flags, [ranks, own rows, ...]."""
    own, size = splits[call.state.rank], call.state.size
    rows = new_tensor((size, own, *x.shape[1:]), x.dtype, x.device)
    flags = exchange_rows(call, x, splits, [own] * size, rows.flatten(0, 1), status=status)
    return flags, rows


def return_pieces(call: Call, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Send row r of contiguous [ranks, own rows, ...] to rank r: what `exchange_pieces` undoes."""
    x = new_tensor((sum(splits), *rows.shape[2:]), rows.dtype, rows.device)
    sent = [splits[call.state.rank]] * call.state.size
    exchange_rows(call, rows.flatten(0, 1), sent, splits, x)
    return x


def gather_rows(call: Call, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks, by rank; `x` is contiguous and has `counts[rank]` of them."""
    out = new_tensor((sum(counts), *x.shape[1:]), x.dtype, x.device)
    sizes = [n * num_bytes(x.dtype, x.shape[1:]) for n in counts]
    if on_host(call.state, x.device):
        sent = [as_bytes(x).cpu()] * call.state.size
        show(call, sent, lambda _: as_bytes(out), received=sizes)
        observe(call, [sizes[call.state.rank]] * call.state.size)
    else:
        _gather_on_device(call, as_bytes(x), sizes, as_bytes(out))
    return out


def send_to_one(
    call: Call, flat: torch.Tensor, sizes: Sequence[int], dst: int, out: torch.Tensor
) -> None:
    """Send `sizes[r]` bytes of each rank r to `dst`; `out` is [sum(sizes)] there, else empty."""
    rank, size = call.state.rank, call.state.size
    sent = [sizes[rank] if r == dst else 0 for r in range(size)]
    exchange_bytes(call, flat, sent, list(sizes) if rank == dst else [0] * size, out)


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
    rank, size = state.rank, state.size
    if size == 1 or not flat.numel():
        return
    if flat.device.type != "cpu":
        call.run(lambda: state.transport.broadcast(flat, root))
        return
    sent = to_each(flat, size) if rank == root else [flat[:0]] * size
    call.exchange(sent, lambda _: from_source(flat, rank, root, size))
    share(call, flat, root)


def shared_pieces(flat: torch.Tensor, size: int) -> tuple[torch.Tensor, ...] | None:
    """Return the piece of a broadcast that its source sends to each rank, which then share theirs.

    None where little, or to few ranks, is sent: then each rank gets all of it.
    """
    if flat.numel() < _SHARED_BYTES or size < 3:
        return None
    pieces: tuple[torch.Tensor, ...] = flat.split(list(even_splits(flat.numel(), size)))
    return pieces


def from_source(flat: torch.Tensor, rank: int, src: int, size: int) -> list[torch.Tensor]:
    """Return, by rank, where the source's flat uint8 goes on this rank; nothing else comes."""
    pieces = shared_pieces(flat, size)
    piece = flat if pieces is None else pieces[rank]
    return [piece if r == src else flat[:0] for r in range(size)]


def to_each(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return, by rank, what the source sends."""
    pieces = shared_pieces(flat, size)
    return [flat] * size if pieces is None else list(pieces)


def share(call: Call, flat: torch.Tensor, src: int) -> None:
    """Let ranks that got a piece of the source's bytes show it to the others. Collective."""
    rank, size = call.state.rank, call.state.size
    pieces = shared_pieces(flat, size)
    if pieces is None:
        return
    own, nothing = pieces[rank], flat[:0]
    sent = [nothing if r == src and r != rank else own for r in range(size)]
    if rank == src:
        call.exchange(sent, lambda _: from_source(flat, rank, src, size))
    else:
        call.exchange(sent, lambda _: pieces)


def _gather_on_device(
    call: Call, source: torch.Tensor, sizes: Sequence[int], target: torch.Tensor
) -> None:
    state, width = call.state, max(sizes)

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        pieces = target.split(list(sizes))
        if state.size == 1:
            target.copy_(source)
        elif min(sizes) == width:
            if width:
                call.run(lambda: state.transport.all_gather(target, source))
        elif width * state.size <= sum(sizes) + sum(sizes) // _MOST_PADDING:
            # Pieces of nearly one size, in one operation.
            padded = source.new_empty(width)
            padded[: source.numel()] = source
            received = source.new_empty(width * state.size)
            call.run(lambda: state.transport.all_gather(received, padded))
            for piece, row in zip(pieces, received.split(width), strict=True):
                piece.copy_(row[: piece.numel()])
        else:
            pieces[state.rank].copy_(source)
            for root, piece in enumerate(pieces):
                broadcast_bytes(call, piece, root)

    run_on_device(call, source, target, run)
    observe(call, [source.numel()] * state.size)

"""All-to-all of bytes: the transfer under all others here, on the host or on a device.

On the host data travels behind the heads that the ranks compare, and receivers learn the sizes from
these. On a device whose backend moves its own data, sizes are announced and the data follows.

    exchange_rows(call, x, sent, received, out)            # row counts known to both ends
    agreed, y = swap(call, flat, sent_bytes, room)         # `room` gets the sizes first, returns y
"""

from collections.abc import Callable, Sequence

import torch

from comm_collectives.base import as_bytes, num_bytes
from comm_collectives.call import Agreed, Call
from comm_collectives.call.frames import Pieces
from comm_collectives.call.groups import GroupState

Room = Callable[[Agreed], torch.Tensor]


def on_host(state: GroupState, device: torch.device) -> bool:
    """Whether what lies on a device travels by way of the host: alike on every rank."""
    return state.transport_type(device) == "cpu"


def swap(
    call: Call,
    source: torch.Tensor,
    sent: Sequence[int],
    room: Room,
    *,
    parts: Sequence[bytes] | None = None,
    status: int = 0,
    received: Sequence[int] | None = None,
) -> tuple[Agreed, torch.Tensor]:
    """Agree, and send `sent[r]` bytes of flat uint8 to rank r. Collective.

    `room` gets what all told and returns flat uint8 for all their sizes, on the source's device;
    `received` are these where the caller knows them.
    """
    if on_host(call.state, source.device):
        pieces = Pieces(source.cpu(), sent)
        agreed, target = show(call, pieces, room, parts=parts, status=status, received=received)
    else:
        agreed = call.meet(parts=parts, status=status, sizes=sent)
        target = room(agreed)
        _exchange_on_device(call, source, sent, agreed.sizes, target)
    observe(call, sent)
    return agreed, target


def exchange_rows(
    call: Call,
    x: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    out: torch.Tensor,
    *,
    status: int = 0,
) -> int:
    """Exchange rows of a contiguous `x`; return the flags of all ranks where they travel with it.

    `out` is contiguous, [sum(received), ...], with the row shape, dtype and device of `x`.
    """
    row_bytes = num_bytes(x.dtype, x.shape[1:])
    sizes = [n * row_bytes for n in sent], [n * row_bytes for n in received]
    return exchange_bytes(call, as_bytes(x), *sizes, as_bytes(out), status=status)


def exchange_bytes(
    call: Call,
    source: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    target: torch.Tensor,
    *,
    status: int = 0,
) -> int:
    """As `exchange_rows`, of flat uint8 tensors."""
    if on_host(call.state, source.device):
        pieces = Pieces(source.cpu(), sent)
        agreed, _ = show(call, pieces, lambda _: target, status=status, received=received)
        status = agreed.flags
    else:
        _exchange_on_device(call, source, sent, received, target)
    observe(call, sent)
    return status


def show(
    call: Call,
    sent: Sequence[torch.Tensor],
    room: Room,
    *,
    parts: Sequence[bytes] | None = None,
    status: int = 0,
    received: Sequence[int] | None = None,
) -> tuple[Agreed, torch.Tensor]:
    """Agree, and send each rank its flat uint8, which is on the host. Collective.

    `room` gets what all told and returns flat uint8 for all their sizes, on any device. Ranks that
    send other sizes than those `received` raise MismatchError.
    """
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(agreed: Agreed) -> Sequence[torch.Tensor]:
        target = room(agreed)
        host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        made.append((target, host))
        return Pieces(host, received or agreed.sizes)

    agreed = call.exchange(sent, place, parts=parts, status=status)
    target, host = made[0]
    if host is not target:
        target.copy_(host)
    return agreed, target


def run_on_device(
    call: Call,
    source: torch.Tensor,
    target: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Run a transfer from source to target where the group's bytes travel, if they lie elsewhere.

    A source that is the target is changed in place.
    """
    kind = call.state.transport_type(source.device)
    if kind == source.device.type:
        run(source, target)
        return
    travel = call.state.transport.place(kind)
    start = source.to(travel)
    place = start if source is target else torch.empty_like(target, device=travel)
    run(start, place)
    target.copy_(place)


def _exchange_on_device(
    call: Call,
    source: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    target: torch.Tensor,
) -> None:
    transport = call.state.transport
    if call.state.size == 1:
        target.copy_(source)
        return

    def run(source: torch.Tensor, target: torch.Tensor) -> None:
        call.run(lambda: transport.exchange(target, source, received, sent))

    run_on_device(call, source, target, run)


def observe(call: Call, sent: Sequence[int]) -> None:
    """Tell who counts that this rank has sent `sent[r]` bytes to rank r."""
    for told in call.state.observers if call.state.size > 1 else ():
        told(call.name, sent)

"""All-to-all of bytes: the transfer under all others here, on the host or on a device.

On the host data travels behind the heads that the ranks compare, and receivers learn the sizes from
these. On a device whose backend moves its own data, sizes are announced and the data follows.

    exchange_rows(call, x, sent, received, out)            # row counts known to both ends
    agreed = swap(call, flat, sent_bytes, room, status=1)  # `room` gets the sizes first
"""

from collections.abc import Callable, Sequence

import torch

from comm_collectives.base import as_bytes, num_bytes
from comm_collectives.call import Agreed, Call
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
) -> Agreed:
    """Agree, and send `sent[r]` bytes of flat uint8 to rank r. Collective.

    `room` gets what all told and returns flat uint8 for all their sizes, on the source's device.
    """
    state = call.state
    if on_host(state, source.device):
        agreed = show(call, source.cpu().split(list(sent)), room, parts=parts, status=status)
    else:
        agreed = call.meet(parts=parts, status=status, sizes=sent)
        _exchange_on_device(call, source, sent, agreed.sizes, room(agreed))
    for observe in state.observers if state.size > 1 else ():
        observe(call.name, sent)
    return agreed


def exchange_rows(
    call: Call, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], out: torch.Tensor
) -> None:
    """Exchange rows of a contiguous `x` without gradients.

    `out` is contiguous, [sum(received), ...], with the row shape, dtype and device of `x`.
    """
    row_bytes = num_bytes(x.dtype, x.shape[1:])
    exchange_bytes(
        call,
        as_bytes(x),
        [n * row_bytes for n in sent],
        [n * row_bytes for n in received],
        as_bytes(out),
    )


def exchange_bytes(
    call: Call,
    source: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    target: torch.Tensor,
) -> None:
    """All-to-all of flat uint8 tensors whose sizes both ends know."""
    state = call.state
    if on_host(state, source.device):
        _exchange_on_host(call, source.cpu().split(list(sent)), received, target)
    else:
        _exchange_on_device(call, source, sent, received, target)
    for observe in state.observers if state.size > 1 else ():
        observe(call.name, sent)


def show_to_all(call: Call, source: torch.Tensor, sizes: Sequence[int], out: torch.Tensor) -> None:
    """Send flat uint8 to every rank, by way of the host; `out` gets that of all, by rank."""
    _exchange_on_host(call, [source.cpu()] * call.state.size, sizes, out)


def show(
    call: Call,
    sent: Sequence[torch.Tensor],
    room: Room,
    *,
    parts: Sequence[bytes] | None = None,
    status: int = 0,
) -> Agreed:
    """Agree, and send each rank its flat uint8, which is on the host. Collective.

    `room` gets what all told and returns flat uint8 for all their sizes, on any device.
    """
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def place(agreed: Agreed) -> Sequence[torch.Tensor]:
        target = room(agreed)
        made.append((target, _host_of(target)))
        pieces: Sequence[torch.Tensor] = made[0][1].split(agreed.sizes)
        return pieces

    agreed = call.exchange(sent, place, parts=parts, status=status)
    target, host = made[0]
    if host is not target:
        target.copy_(host)
    return agreed


def _host_of(target: torch.Tensor) -> torch.Tensor:
    return target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")


def _exchange_on_host(
    call: Call, sent: Sequence[torch.Tensor], received: Sequence[int], target: torch.Tensor
) -> None:
    host = _host_of(target)
    pieces = host.split(list(received))
    call.exchange(sent, lambda _: pieces)
    if host is not target:
        target.copy_(host)


def _exchange_on_device(
    call: Call,
    source: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    target: torch.Tensor,
) -> None:
    state = call.state
    if state.size == 1:
        target.copy_(source)
        return
    travel = state.transport_type(source.device)
    place = target
    if travel != source.device.type:
        source, place = source.to(travel), torch.empty_like(target, device=travel)
    call.run(lambda: state.transport.exchange(place, source, received, sent))
    if place is not target:
        target.copy_(place)

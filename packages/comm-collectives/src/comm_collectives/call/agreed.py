"""What the ranks of a call have told each other, and where their data goes.

agreed = Agreed(flags=0, parts=[b"", b""], sizes=[512, 512])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What the heads of a step told."""

    flags: int  # those of all ranks or-ed
    parts: list[bytes]  # by rank, what it told this one
    sizes: list[int]  # by rank, the bytes of data that it has for this one


Place = Callable[[Agreed], Sequence[torch.Tensor]]


def exchange_alone(
    rank: int,
    sent: Sequence[torch.Tensor] | None,
    place: Place | None,
    told: Agreed,
) -> Agreed:
    """As `Call.exchange` where each of the other ranks tells and sends this one as much as it does
    itself; see `simulation.stand_alone`. Tensors may be fake.

    Args:
        told: what this rank has for each rank.
    """
    count = len(told.parts)
    sizes = told.sizes if sent is None else [flat.numel() for flat in sent]
    agreed = Agreed(flags=told.flags, parts=[told.parts[rank]] * count, sizes=[sizes[rank]] * count)
    targets = () if place is None else place(agreed)
    if sent is not None:
        for target in targets:
            if target.untyped_storage() is sent[rank].untyped_storage():
                continue  # this rank's own, which is there: a copy would count as a change
            common = min(target.numel(), sent[rank].numel())
            target[:common].copy_(sent[rank][:common])
            target[common:].zero_()
    return agreed

"""One order in which both ranks of a pair queue what their devices move (NCCL's rule).

A device does the transfers of a pair one after the other, and one that is large ends with the
other side's. So two ranks that both queued their send first would wait for ever. The lower rank
gives the order: it queues its sends as they are made and its receives as it reads of a message,
and tells the peer of the latter (`Word.GRANTED`). The higher rank queues what it reads of in that
stream, receives and sends alike.

    held = HeldSends(transport, peer, holds=rank > peer, launch=launch)
    works = held.send(tensors, key=0, place=3, number=7)     # empty until it is granted
    held.grant(0, 3)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch

from comm_collectives.base.transport import Pending, Transport
from comm_collectives.call.devices import Start

# Gives the device transfers, says what they are and with which rank, and has them looked after.
Launch = Callable[[str, int, Start], list[Pending]]


@final
@dataclass(frozen=True, slots=True)
class _Refused:
    """A transfer that could not be queued."""

    error: RuntimeError

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise self.error

    def is_completed(self) -> bool:
        return True


@final
class HeldSends:
    """What this rank sends to a peer from a device; `holds`: only when that says so."""

    def __init__(self, transport: Transport, peer: int, *, holds: bool, launch: Launch) -> None:
        self._transport, self._peer, self._holds = transport, peer, holds
        self._launch = launch
        self._held: dict[tuple[int, int], tuple[int, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def has(self, number: int) -> bool:
        """Whether the message of a frame is held."""
        return any(of == number for of, _ in list(self._held.values()))

    def send(
        self, tensors: Sequence[torch.Tensor], *, key: int, place: int, number: int
    ) -> list[Pending]:
        """Queue flat tensors behind what the current stream has done, or hold them for `grant`.

        Returns the transfers under way; those that are held come to the list then.
        """
        works: list[Pending] = []
        peer = self._peer

        def launch() -> None:
            works.extend(
                self._launch(
                    "send to", peer, lambda: [self._transport.send(x, peer) for x in tensors]
                )
            )

        if not tensors or not self._holds:
            launch()
            return works
        stream = torch.accelerator.current_stream(tensors[0].device)

        def launch_there() -> None:
            try:
                with stream:
                    launch()
            except RuntimeError as error:  # for who waits for the send
                works.append(_Refused(error))

        self._held[key, place] = number, launch_there
        return works

    def grant(self, key: int, place: int) -> None:
        """Queue what was held."""
        held = self._held.get((key, place))
        if held is not None:
            held[1]()
            del self._held[key, place]

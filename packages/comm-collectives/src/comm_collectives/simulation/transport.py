"""What simulated ranks send each other beside their calls, with the failures of gloo in its words.

Calls go over `SimStreams`; `send` and `recv` over the backend, as they do for real. A process that
ends closes its connections: whoever still needs it fails at once. A transfer that runs into the
group's limit closes all connections of its rank in that group.

    transport = SimTransport(world, Messages(), ranks=(0, 1, 2), index=1)
    transport.recv(flat, 0).wait()
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn, final

import torch

from comm_collectives._torch_private import Store
from comm_collectives.base import as_bytes, bytes_of
from comm_collectives.base.transport import Pending, Transport
from comm_collectives.errors import CommError
from comm_collectives.simulation.scheduler import Signal, VirtualClock
from comm_collectives.simulation.world import World

_GAVE_UP = "Application timeout caused pair closure"
_CLOSED = "Connection closed by peer"
_RESET = "Connection reset by peer"
_NO_LIMIT = timedelta.max


@final
class MessageQueue:
    """Messages from one rank to another, in their order; None for one that came cut short."""

    def __init__(self) -> None:
        self.sent: list[bytes | None] = []
        self._asked = 0
        self.signal = Signal()

    def next_number(self) -> int:
        """Return the number of the message that the next receive gets."""
        self._asked += 1
        return self._asked - 1


@final
class Messages:
    """The backend's connections in one group, and what runs over them."""

    def __init__(self) -> None:
        self._closed: set[tuple[int, int]] = set()
        self._gone: dict[int, str] = {}
        self._queues: dict[tuple[int, int], MessageQueue] = defaultdict(MessageQueue)

    def queue(self, src: int, dst: int) -> MessageQueue:
        """Return the messages from one rank to another."""
        return self._queues[src, dst]

    def close(self, one: int, other: int) -> None:
        """Close one connection."""
        self._closed |= {(one, other), (other, one)}

    def leave(self, rank: int, reason: str = _CLOSED) -> None:
        """Close all connections of a rank; `reason` is what it will hear itself, if it lives."""
        self._gone.setdefault(rank, reason)

    def problem(self, rank: int, other: int) -> str | None:
        """Return why a rank has no connection to another one; None if it has."""
        if rank in self._gone:
            return self._gone[rank]
        return _CLOSED if other in self._gone or (rank, other) in self._closed else None

    def signals(self) -> Iterator[Signal]:
        """Yield everything that somebody may wait for."""
        for queue in self._queues.values():
            yield queue.signal


@final
class SimTransport(Transport):
    """The backend of one rank of a simulated group; `index` is its number inside the group."""

    def __init__(
        self, world: World, messages: Messages, *, ranks: Sequence[int], index: int
    ) -> None:
        self.world = world
        self.clock = VirtualClock(world.scheduler)
        self.limit_s = world.setting.limit_s
        self._messages, self._ranks, self._index = messages, ranks, index

    def exchange(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        received_bytes: Sequence[int],
        sent_bytes: Sequence[int],
    ) -> Pending:
        """For data on devices, which simulated ranks do not have."""
        raise _no_device()

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> Pending:
        """As exchange."""
        raise _no_device()

    def broadcast(self, flat: torch.Tensor, root: int) -> Pending:
        """As exchange."""
        raise _no_device()

    def all_reduce(self, flat: torch.Tensor, op: str) -> Pending:
        """As exchange."""
        raise _no_device()

    def send(self, flat: torch.Tensor, dst: int) -> Pending:
        """The message is on its way at once."""
        post = self.world.operate(self._ranks[self._index])
        queue = self._messages.queue(self._index, dst)
        if self._messages.problem(self._index, dst) is not None:
            raise RuntimeError(self._problem_with(dst))
        if post.reached is None or post.reached > 0:
            is_cut = post.cut_at == self._ranks[dst]
            queue.sent.append(None if is_cut else bytes_of(as_bytes(flat)))
        self.world.scheduler.fire(queue.signal)
        if post.reached is not None:
            self.world.die(self._ranks[self._index])
        return SimWork(self, queue.signal, lambda: True)

    def recv(self, flat: torch.Tensor, src: int) -> Pending:
        """Take the next message of one rank."""
        if self.world.operate(self._ranks[self._index]).reached is not None:
            self.world.die(self._ranks[self._index])
        queue = self._messages.queue(src, self._index)
        number = queue.next_number()
        return SimWork(self, queue.signal, lambda: self._take(queue, number, src, flat))

    def store(self) -> Store:
        """Return the store of the simulation, which has what a torch Store has for reports."""
        return self.world.store

    def give_up(self) -> None:
        """Close all connections of this rank in this group, as gloo does after a passed limit."""
        self._messages.leave(self._index, _GAVE_UP)
        self.world.notify()

    def _problem_with(self, peer: int) -> str:
        problem = self._messages.problem(self._index, peer) or _CLOSED
        return f"{problem} [simulated rank {self._ranks[peer]}]"

    def _break(self, peer: int) -> NoReturn:
        """End the connection to a peer whose message came cut short."""
        self._messages.close(self._index, peer)
        self.world.notify()
        raise RuntimeError(f"{_RESET} [simulated rank {self._ranks[peer]}]")

    def _take(self, queue: MessageQueue, number: int, src: int, flat: torch.Tensor) -> bool:
        if number >= len(queue.sent):
            if self._messages.problem(self._index, src) is not None:
                raise RuntimeError(self._problem_with(src))
            return False
        message = queue.sent[number]
        if message is None or len(message) > flat.nbytes:
            self._break(src)
        ctypes.memmove(flat.data_ptr(), message, len(message))
        return True


@final
class SimWork:
    """An operation under way, as `torch.distributed.Work`."""

    def __init__(
        self, transport: SimTransport, signal: Signal, attempt: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._signal = signal
        self._attempt = attempt
        self._deadline_s = transport.clock.now_s() + transport.limit_s
        self._is_done = False
        self._error: str | None = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for the end.

        Raises:
            RuntimeError: it failed, in the backend's words, or the limit passed.
        """
        scheduler = self._transport.world.scheduler
        own = self._deadline_s
        until_s = own if timeout is _NO_LIMIT else scheduler.now_s + timeout.total_seconds()
        while not self._advance():
            if scheduler.now_s >= own:
                limit = f"Timed out waiting {1000 * self._transport.limit_s:g}ms for recv"
                self._error = f"{limit} operation to complete"
                self._transport.give_up()
                raise RuntimeError(self._error)
            if scheduler.now_s >= until_s:
                raise RuntimeError("Operation timed out!")
            scheduler.block(self._signal, min(own, until_s))
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done or self._error is not None

    def _advance(self) -> bool:
        if self._error is not None:
            raise RuntimeError(self._error)
        if not self._is_done:
            try:
                self._is_done = self._attempt()
            except RuntimeError as error:
                self._error = str(error)
                raise
        return self._is_done


def _no_device() -> CommError:
    return CommError("simulated ranks have no device; give tensors on the host")

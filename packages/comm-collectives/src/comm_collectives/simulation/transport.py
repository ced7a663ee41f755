"""The transport of a simulated rank, with the failures of gloo in gloo's words.

Gloo moves a message once both ends have begun the operation, and an operation ends when its own
messages have passed. A process that ends closes its connections: whoever still needs it fails at
once. A transfer that runs into the group's limit closes all connections of its rank in that group.

    transport = SimTransport(world, wire, ranks=(0, 1, 2), index=1)
    transport.all_gather(target, source).wait()
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, cast, final

import torch

from comm_collectives._torch_private import Store
from comm_collectives.base import as_bytes, bytes_of
from comm_collectives.base.transport import Pending, Transport
from comm_collectives.simulation.scheduler import Signal, VirtualClock
from comm_collectives.simulation.wire import (
    CLOSED,
    Aborted,
    MessageQueue,
    Round,
    Wire,
    offsets_of,
    scatter_bytes,
)
from comm_collectives.simulation.world import Post, World

_GAVE_UP = "Application timeout caused pair closure"
_RESET = "Connection reset by peer"
_NO_LIMIT = timedelta.max
_BROADCAST = "broadcast from"


@final
class SimTransport(Transport):
    """The operations of one rank of a simulated group; `index` is its number inside the group."""

    def __init__(self, world: World, wire: Wire, *, ranks: Sequence[int], index: int) -> None:
        self.world = world
        self.clock = VirtualClock(world.scheduler)
        self.limit_s = world.setting.limit_s
        self._wire, self._ranks, self._index = wire, ranks, index
        self._number = 0

    def exchange(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        received_bytes: Sequence[int],
        sent_bytes: Sequence[int],
    ) -> Pending:
        """Every rank sends a piece to every rank."""
        round_ = self._begin("exchange", bytes_of(source), offsets_of(sent_bytes))
        return self._work(
            round_, lambda: scatter_bytes(round_.pieces(self._index), received_bytes, target)
        )

    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> Pending:
        """Every rank sends one message to all."""
        round_ = self._begin("all_gather", bytes_of(source))
        sizes = [target.numel() // len(self._ranks)] * len(self._ranks)
        return self._work(round_, lambda: scatter_bytes(round_.pieces(self._index), sizes, target))

    def broadcast(self, flat: torch.Tensor, root: int) -> Pending:
        """One rank sends, and waits until all have received."""
        is_root = root == self._index
        round_ = self._begin(f"{_BROADCAST} {root}", bytes_of(flat) if is_root else None)
        if is_root:
            return self._work(round_, lambda: None)

        def deliver() -> None:
            scatter_bytes([round_.piece(root, self._index)], [flat.numel()], flat)

        return self._work(round_, deliver, peers=(root,))

    def all_reduce(self, flat: torch.Tensor, op: str) -> Pending:
        """Reduce in the order of the ranks, in the tensor's own arithmetic."""
        data = as_bytes(flat)
        round_ = self._begin("all_reduce", bytes_of(data))

        def deliver() -> None:
            reduced = round_.reduced((flat.dtype, op), data.numel())
            scatter_bytes([reduced], [data.numel()], data)

        return self._work(round_, deliver)

    def send(self, flat: torch.Tensor, dst: int) -> Pending:
        """The message is on its way at once."""
        post = self._operate()
        channel = self._wire.channel(self._index, dst)
        if self._wire.problem(self._index, dst) is not None:
            raise RuntimeError(self._problem_with(dst))
        if post.reached is None or post.reached > 0:
            channel.send(None if post.cut_at == self._ranks[dst] else bytes_of(as_bytes(flat)))
        self.world.scheduler.fire(channel.signal)
        self._end(post)
        return SimWork(self, channel.signal, lambda: True)

    def recv(self, flat: torch.Tensor, src: int) -> Pending:
        """Take the next message of one rank."""
        self._end(self._operate())
        channel = self._wire.channel(src, self._index)
        number = channel.next_number()
        return SimWork(self, channel.signal, lambda: self._take(channel, number, src, flat))

    def store(self) -> Store:
        """Return the store of the simulation, which has what a torch Store has for reports."""
        return cast(Store, self.world.store)

    def give_up(self) -> None:
        """Close all connections of this rank in this group, as gloo does after a passed limit."""
        self._wire.leave(self._index, _GAVE_UP)
        self.world.notify()

    def abort(self, reason: Aborted) -> None:
        """End the process of this rank, all its threads."""
        self.world.bury(self._ranks[self._index], reason)

    def _operate(self) -> Post:
        return self.world.operate(self._ranks[self._index])

    def _end(self, post: Post) -> None:
        if post.reached is not None:
            self.world.die(self._ranks[self._index])

    def _begin(self, kind: str, data: bytes | None, offsets: Sequence[int] | None = None) -> Round:
        self._number += 1
        number = self._number
        post = self._operate()
        index, size = self._index, len(self._ranks)
        round_ = self._wire.round(number, kind)
        round_.begin(index, data, offsets)
        if post.cut_at is not None and post.cut_at in self._ranks:
            round_.spoil(index, self._ranks.index(post.cut_at), cut=True)
        if post.reached is not None:
            for peer in [peer for peer in range(size) if peer != index][post.reached :]:
                round_.spoil(index, peer)
            self.world.die(self._ranks[index])
        # Receivers of a broadcast wait for one rank, all others for all, unless somebody is gone.
        if round_.num_here == size or kind.startswith(_BROADCAST) or self._wire.has_closed:
            self.world.scheduler.fire(round_.signal)
        return round_

    def _work(
        self, round_: Round, deliver: Callable[[], None], *, peers: Sequence[int] | None = None
    ) -> "SimWork":
        """Wait until the messages to and from these peers have passed, then deliver."""
        others = range(len(self._ranks)) if peers is None else peers

        def attempt() -> bool:
            if not round_.is_complete and not self._have_passed(round_, others):
                return False
            deliver()
            return True

        return SimWork(self, round_.signal, attempt)

    def _have_passed(self, round_: Round, peers: Sequence[int]) -> bool:
        """Whether what this rank waits for has happened.

        Raises:
            RuntimeError: it cannot happen any more.
        """
        index = self._index
        for peer, is_cut in round_.flaws(index).items():
            if peer in peers and not is_cut:
                raise RuntimeError(self._problem_with(peer))
            if peer in peers and round_.here[peer]:
                self._break(peer)
        return all([round_.here[peer] for peer in peers])

    def _problem_with(self, peer: int) -> str:
        problem = self._wire.problem(self._index, peer) or CLOSED
        return f"{problem} [simulated rank {self._ranks[peer]}]"

    def _break(self, peer: int) -> NoReturn:
        """End the connection to a peer whose message came cut short."""
        self._wire.close(self._index, peer)
        self.world.notify()
        raise RuntimeError(f"{_RESET} [simulated rank {self._ranks[peer]}]")

    def _take(self, channel: MessageQueue, number: int, src: int, flat: torch.Tensor) -> bool:
        if not channel.has(number):
            if self._wire.problem(self._index, src) is not None:
                raise RuntimeError(self._problem_with(src))
            return False
        message = channel.message(number)
        if message is None:
            self._break(src)
        scatter_bytes([message], [flat.nbytes], flat)
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
            except Aborted as abort:
                self._transport.abort(abort)
                raise
            except RuntimeError as error:
                self._error = str(error)
                raise
        return self._is_done

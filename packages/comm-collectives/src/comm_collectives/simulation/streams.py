"""Streams between simulated ranks: what one sends lies in a queue until the other takes it.

pipes = Pipes(size=3, capacity=1 << 16)
streams = SimStreams(pipes, world, ranks=(0, 1, 2), index=1)
"""

from collections.abc import Collection, Iterator, Sequence
from typing import final

from comm_collectives.base.streams import Streams
from comm_collectives.simulation.scheduler import Signal
from comm_collectives.simulation.world import World

_SLOW = 0.75  # of the waits end when all have sent something, which costs fewer switches


@final
class Pipes:
    """The bytes under way between the ranks of one group, and the connections that have ended."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        self.signals = [Signal() for _ in range(size)]
        self.awaited: list[set[int]] = [set() for _ in range(size)]  # before a waiting rank looks
        self.ended: set[tuple[int, int]] = set()
        self._bytes = {(i, j): bytearray() for i in range(size) for j in range(size) if i != j}

    def of(self, src: int, dst: int) -> bytearray:
        """Return what is under way from one rank to another."""
        return self._bytes[src, dst]

    def end(self, one: int, other: int) -> None:
        """End the connection of two ranks; what was sent before can still be received."""
        self.ended |= {(one, other), (other, one)}

    def leave(self, rank: int) -> None:
        """End all connections of a rank."""
        for other in range(len(self.signals)):
            if other != rank:
                self.end(rank, other)

    def all_signals(self) -> Iterator[Signal]:
        """Yield everything that somebody may wait for."""
        yield from self.signals


@final
class SimStreams(Streams):
    """The streams of one simulated rank; each `send_some` is an operation of faults."""

    def __init__(self, pipes: Pipes, world: World, *, ranks: Sequence[int], index: int) -> None:
        self.rank, self.size = index, len(ranks)
        self._pipes, self._world, self._ranks = pipes, world, ranks
        self._cut: int | None = None  # the peer to which the next message is cut short

    def send_some(self, peer: int, data: memoryview) -> int:
        """See Streams."""
        pipe = self._pipes.of(self.rank, peer)
        post = self._world.operate(self._ranks[self.rank])
        self._cut = self._cut if post.cut_at is None else post.cut_at
        if (self.rank, peer) in self._pipes.ended:
            sent = len(data)
        else:
            sent = min(len(data), self._pipes.capacity - len(pipe))
            is_cut = sent > 0 and self._cut == self._ranks[peer]
            pipe += data[: sent // 2 if is_cut else sent]
            if is_cut:
                self._pipes.end(self.rank, peer)
            awaited = self._pipes.awaited[peer]
            awaited.discard(self.rank)
            if not awaited or is_cut:
                self._world.scheduler.fire(self._pipes.signals[peer])
        if post.reached is not None:
            self._world.die(self._ranks[self.rank])
        return sent

    def recv_some(self, peer: int, into: memoryview) -> int:
        """See Streams."""
        pipe = self._pipes.of(peer, self.rank)
        got = min(len(into), len(pipe))
        if got:
            was_full = len(pipe) == self._pipes.capacity
            into[:got] = pipe[:got]
            del pipe[:got]
            if was_full:
                self._world.scheduler.fire(self._pipes.signals[peer])
        return got

    def wait(self, receiving: Collection[int], sending: Collection[int], timeout_s: float) -> None:
        """See Streams."""
        pipes, scheduler, rank = self._pipes, self._world.scheduler, self.rank
        gone = self.gone()
        has_come = any(pipes.of(peer, rank) for peer in receiving)
        has_room = any(len(pipes.of(rank, peer)) < pipes.capacity for peer in sending)
        if not (has_come or has_room or any(peer in gone for peer in receiving)):
            # A rank that is not scheduled at once finds everybody's bytes together.
            is_slow = not sending and scheduler.draw() < _SLOW
            pipes.awaited[rank] = set(receiving) if is_slow else set()
            scheduler.block(pipes.signals[rank], scheduler.now_s + timeout_s)

    def gone(self) -> tuple[int, ...]:
        """See Streams."""
        ended = self._pipes.ended
        if not ended:
            return ()
        return tuple(peer for peer in range(self.size) if (self.rank, peer) in ended)

    def close(self) -> None:
        """See Streams."""
        self._pipes.leave(self.rank)
        self._world.notify()

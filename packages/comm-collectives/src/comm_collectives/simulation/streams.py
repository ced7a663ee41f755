"""Streams between simulated ranks: what one sends lies in a queue until the other takes it.

streams = SimStreams(world, ranks=(0, 1, 2), index=1, lane="calls")
"""

from collections.abc import Collection, Mapping
from typing import final

from comm_collectives.base.streams import Streams
from comm_collectives.simulation.world import World

_SLOW = 0.75  # of the waits end when all have sent something, which costs fewer switches
_BREAKS = 0.3  # of the rounds of sends are interrupted somewhere, between two bytes


@final
class SimStreams(Streams):
    """The streams of one simulated rank.

    An operation of faults is a round of sends, each to a peer farther away than the one before.
    """

    def __init__(self, world: World, *, ranks: tuple[int, ...], index: int, lane: str) -> None:
        self.rank, self.size = index, len(ranks)
        self.send_each = self._send_each
        self._pipes = pipes = world.pipes(ranks, lane)
        self._world, self._ranks = world, ranks
        self._ended, self._capacity, self._signals = (
            pipes.ended[index],
            pipes.capacity,
            pipes.signals,
        )
        self._incoming = pipes.under_way[index]
        self._outgoing = [incoming[index] for incoming in pipes.under_way]
        self._may_be_slow = lane == "calls"  # or several tasks of a rank wait here
        self._place = self.size  # of the last send in its round
        self._break_at = 0  # the place in whose message others go first
        self._is_broken = False  # the last send, whose rest comes next
        self._reached: int | None = None  # how many peers the last round of this rank reaches
        self._cut: int | None = None  # the peer to which the next message is cut short
        self._apart: Collection[int] = ()  # peers at which something strikes in this round

    def send_some(self, peer: int, data: memoryview) -> int:
        """See Streams."""
        place = (peer - self.rank) % self.size
        goes_on = self._is_broken and place == self._place
        if place <= self._place and not goes_on:
            self._begin()
        self._place, breaks = place, place == self._break_at and not goes_on
        self._is_broken = breaks and len(data) > 1
        if self._is_broken:
            data = data[: 1 + int(self._world.scheduler.draw() * (len(data) - 1))]
        sent = len(data)
        if peer not in self._ended:
            pipe = self._outgoing[peer]
            room = self._capacity - len(pipe)
            if sent > room:
                sent, data = room, data[:room]
            is_cut = sent > 0 and self._cut == self._ranks[peer]
            pipe += data[: sent // 2] if is_cut else data
            if is_cut:
                self._pipes.end(self.rank, peer)
            if self._signals[peer].waiters:
                self._wake(peer, at_once=is_cut)
        if place == self._reached and not self._is_broken:
            self._world.die(self._ranks[self.rank])
        if breaks:
            self._world.scheduler.give_way()
        return sent

    def recv_some(self, peer: int, into: memoryview) -> int:
        """See Streams."""
        pipe = self._incoming[peer]
        there = len(pipe)
        if not there:
            return 0
        got = len(into)
        if got >= there:
            got = there
            into[:got] = pipe
            pipe.clear()
        else:
            into[:] = pipe[:got]
            del pipe[:got]
        if there == self._capacity:
            self._world.scheduler.fire(self._signals[peer])
        return got

    def ready(self) -> Collection[int]:
        """See Streams."""
        return {peer for peer, pipe in enumerate(self._incoming) if pipe}

    def wait(self, receiving: Collection[int], sending: Collection[int], timeout_s: float) -> None:
        """See Streams."""
        pipes, scheduler, rank = self._pipes, self._world.scheduler, self.rank
        incoming = self._incoming
        has_come = any([incoming[peer] for peer in receiving])
        has_room = any(len(self._outgoing[peer]) < self._capacity for peer in sending)
        if not (has_come or has_room):
            # A rank that is not scheduled at once finds everybody's bytes together.
            is_slow = self._may_be_slow and not sending and scheduler.draw() < _SLOW
            pipes.awaited[rank] = set(receiving) if is_slow else set()
            scheduler.block(pipes.signals[rank], scheduler.now_s + timeout_s)

    def gone(self) -> tuple[int, ...]:
        """See Streams."""
        return tuple(sorted(self._ended))

    def close(self) -> None:
        """See Streams."""
        self._pipes.leave(self.rank)
        self._world.notify()

    def _send_each(self, messages: Mapping[int, memoryview], part: dict[int, int]) -> None:
        """As `send_some` to each; in fewer steps to a rank at which nothing strikes."""
        apart: Collection[int] = messages.keys()  # before the first one, which may begin a round
        peer = self.rank
        for peer, data in messages.items():
            pipe = self._outgoing[peer]
            if peer in apart or len(pipe) + len(data) > self._capacity:
                sent = self.send_some(peer, data)
                while sent < len(data) and (more := self.send_some(peer, data[sent:])):
                    sent += more
                if sent < len(data):
                    part[peer] = sent
                apart = self._apart
            elif peer not in self._ended:
                pipe += data
                if self._signals[peer].waiters:
                    self._wake(peer, at_once=False)
        self._place = (peer - self.rank) % self.size if messages else self._place

    def _begin(self) -> None:
        """Begin a round of sends."""
        rank = self._ranks[self.rank]
        if self._reached is not None:
            self._world.die(rank)
        post = self._world.operate(rank)
        self._reached = post.reached
        self._cut = self._cut if post.cut_at is None else post.cut_at
        self._break_at = int(self._world.scheduler.draw() * self.size / _BREAKS)
        places = self._break_at, self._reached
        self._apart = {(self.rank + place) % self.size for place in places if place is not None}
        if self._cut in self._ranks:
            self._apart.add(self._ranks.index(self._cut))

    def _wake(self, peer: int, *, at_once: bool) -> None:
        """Let a peer that waits go on, if this is what it waits for."""
        awaited = self._pipes.awaited[peer]
        awaited.discard(self.rank)
        if at_once or not awaited:
            self._world.scheduler.fire(self._signals[peer])

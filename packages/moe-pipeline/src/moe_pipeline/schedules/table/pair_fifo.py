"""Ranks whose transfers with a peer are done in the order in which they post them, as on NCCL.

What a rank posts on a communicator to a peer goes into one queue, sends and receives alike. A send
and its receive are done when both are first in their queues; with room in a buffer the send is done
before. A rank stops at no send; it stops at a receive until that is done, so what an executor gains
by waiting later, at the computation that needs the message, is not counted on: who posts earlier
never waits longer.

    run = PairRun([[Post(1, 0, True, "a")], [Post(0, 0, False, "a")]], send_buffers=0)
    run.run()
    assert run.at == [1, 1] and not run.crossed
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class Post:
    """A transfer as a rank posts it."""

    peer: int
    communicator: int
    sends: bool
    message: Hashable


# A rank, its peer and a communicator: the queue of what the rank posted there.
_Queue = tuple[int, int, int]


@final
class PairRun:
    """The rows of all ranks, None for what is no transfer.

    Attributes:
        at: by rank how many actions are done.
        crossed: (rank, index) of receives that got another message than theirs.
    """

    def __init__(self, rows: Sequence[Sequence[Post | None]], send_buffers: int) -> None:
        self.at = [0] * len(rows)
        self.crossed: list[tuple[int, int]] = []
        self._rows, self._send_buffers = rows, send_buffers
        self._queues: dict[_Queue, deque[tuple[int, Post]]] = defaultdict(deque)
        self._sent: dict[_Queue, deque[Hashable]] = defaultdict(deque)  # done before their receive
        self._awaited: list[int | None] = [None] * len(rows)  # the receive at which a rank stands

    def run(self) -> None:
        """Let all ranks go on until none can."""
        # A list, not a generator: every rank gets its turn in each round.
        while any([self._advance(rank) for rank in range(len(self._rows))]):
            pass

    def _advance(self, rank: int) -> bool:
        row, start = self._rows[rank], self.at[rank]
        while self.at[rank] < len(row):
            index = self.at[rank]
            post = row[index]
            if post is not None and self._awaited[rank] != index:
                queue = (rank, post.peer, post.communicator)
                self._queues[queue].append((index, post))
                self._awaited[rank] = index
                self._transfer(queue)
            if post is not None and not post.sends and self._is_posted(rank, index, post):
                return self.at[rank] > start
            self.at[rank] += 1
        return self.at[rank] > start

    def _is_posted(self, rank: int, index: int, post: Post) -> bool:
        """Whether a receive is still in its queue."""
        queue = self._queues[rank, post.peer, post.communicator]
        return any(number == index for number, _ in queue)

    def _transfer(self, queue: _Queue) -> None:
        """Do what a pair can do on a communicator."""
        rank, peer, communicator = queue
        sides = (queue, (peer, rank, communicator))
        while any([self._do_first(own, other) for own, other in (sides, sides[::-1])]):
            pass

    def _do_first(self, own: _Queue, other: _Queue) -> bool:
        """Do the first of a queue, if that can be; whether it was done."""
        if not self._queues[own]:
            return False
        index, post = self._queues[own][0]
        if post.sends:
            is_met = bool(self._queues[other]) and not self._queues[other][0][1].sends
            if not is_met and len(self._sent[own]) >= self._send_buffers:
                return False
            self._sent[own].append(post.message)
        elif not self._sent[other]:
            return False
        elif self._sent[other].popleft() != post.message:
            self.crossed.append((own[0], index))
        self._queues[own].popleft()
        return True

"""Ranks whose transfers with a peer are done in the order in which they post them, as on NCCL.

What a rank posts on a communicator to a peer goes into one queue, sends and receives alike; or what
it posts to all peers, as in groups that were made for a device. A send and its receive are done
when both are first in their queues; with room in a buffer the send is done before. A rank stops at
no send; it stops at a receive until that is done, so what an executor gains by waiting later, at
the computation that needs the message, is not counted on: who posts earlier never waits longer.

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


# A rank, its peer (-1 where all share one) and a communicator: the queue of what the rank posted.
_Queue = tuple[int, int, int]


@final
class PairRun:
    """The rows of all ranks, None for what is no transfer.

    Attributes:
        at: by rank how many actions are done.
        crossed: (rank, index) of receives that got another message than theirs.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[Post | None]],
        send_buffers: int,
        *,
        has_one_queue: bool = False,
    ) -> None:
        self._has_one_queue = has_one_queue
        self.at = [0] * len(rows)
        self.crossed: list[tuple[int, int]] = []
        self._rows, self._send_buffers = rows, send_buffers
        self._queues: dict[_Queue, deque[tuple[int, Post]]] = defaultdict(deque)
        # By sender, receiver and communicator, sends that were done before their receive.
        self._sent: dict[_Queue, deque[Hashable]] = defaultdict(deque)
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
                self._queues[self._queue(rank, post)].append((index, post))
                self._awaited[rank] = index
                self._transfer(rank, post)
            if post is not None and not post.sends and self._is_posted(rank, index, post):
                return self.at[rank] > start
            self.at[rank] += 1
        return self.at[rank] > start

    def _queue(self, rank: int, post: Post) -> _Queue:
        return rank, -1 if self._has_one_queue else post.peer, post.communicator

    def _is_posted(self, rank: int, index: int, post: Post) -> bool:
        """Whether a receive is still in its queue."""
        return any(number == index for number, _ in self._queues[self._queue(rank, post)])

    def _transfer(self, rank: int, post: Post) -> None:
        """Do what the end of a queue, and of those that it held up, makes possible."""
        ends = deque([(rank, post)])
        while ends:
            here, last = ends.popleft()
            other = Post(here, last.communicator, not last.sends, None)
            for side, seen in ((here, last), (last.peer, other)):
                done = self._do_first(side, seen)
                if done is not None:
                    # Both ends may have something else in front now.
                    ends += [(side, done), (done.peer, Post(side, done.communicator, True, None))]
                    head = self._queues[self._queue(side, done)]
                    ends += [(side, head[0][1])] if head else []

    def _do_first(self, rank: int, near: Post) -> Post | None:
        """Do the first of the queue to which `near` belongs; what was done."""
        own = self._queue(rank, near)
        if not self._queues[own]:
            return None
        index, post = self._queues[own][0]
        here, there = (rank, post.peer, post.communicator), (post.peer, rank, post.communicator)
        if post.sends:
            if len(self._sent[here]) >= self._send_buffers + int(self._is_met(rank, post)):
                return None
            self._sent[here].append(post.message)
        elif not self._sent[there]:
            return None
        elif self._sent[there].popleft() != post.message:
            self.crossed.append((rank, index))
        self._queues[own].popleft()
        return post

    def _is_met(self, rank: int, post: Post) -> bool:
        """Whether the peer's queue begins with a receive from this rank."""
        theirs = self._queues[self._queue(post.peer, Post(rank, post.communicator, False, None))]
        return bool(theirs) and theirs[0][1].peer == rank and not theirs[0][1].sends

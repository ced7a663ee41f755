"""One ordered stream of bytes to each other rank of a group: all that a communicator has to be.

What travels over it (frames) says itself where it begins and ends, so a stream knows
no messages. Nothing here blocks but `wait`, so that whoever waits can look around meanwhile, and
gets an end of its own choosing: nothing is closed because a limit passed.

Invariants: bytes arrive once, in order, or never; a byte that `send_some` took is on its way and
its memory may change. What a peer sent before it closed or ended can still be received, and `gone`
says so at once all the same. One thread at a time; over TCP one for each peer and direction.

    sent += streams.send_some(peer, view[sent:])       # 0: full at the moment
    got += streams.recv_some(peer, into[got:])         # 0: nothing there at the moment
    streams.wait(receiving=[peer], sending=[], timeout_s=0.5)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping


class Streams(ABC):
    """The streams between this rank and the others of a group; ranks are numbers inside it.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        send_each: sends to several ranks in their order, and says how much was taken where that is
            not all; None where that is no quicker than `send_some` for each.
    """

    rank: int
    size: int
    send_each: Callable[[Mapping[int, memoryview], dict[int, int]], None] | None = None

    @abstractmethod
    def send_some(self, peer: int, data: memoryview) -> int:
        """Return how many bytes of `data` (bytes, contiguous) were taken: 0 if there is no room.

        What is sent to a peer that is gone is taken and lost; `gone` tells.
        """

    @abstractmethod
    def recv_some(self, peer: int, into: memoryview) -> int:
        """Return how many bytes were put into `into`: 0 if none are there, or none will come."""

    def ready(self) -> Collection[int]:
        """Return the ranks from which bytes may be there, all if that is not known for nothing."""
        return range(self.size)

    @abstractmethod
    def wait(self, receiving: Collection[int], sending: Collection[int], timeout_s: float) -> None:
        """Wait until bytes may have come from, or may go to, one of these; at most so long.

        Returns early when a rank is newly gone, and may do so for no reason at all.
        """

    @abstractmethod
    def gone(self) -> tuple[int, ...]:
        """Return the other ranks whose process has ended, or who have closed their streams."""

    @abstractmethod
    def close(self) -> None:
        """End the streams of this rank; the others find it gone. May be called again."""

"""Ranks that wait for each other's messages on links, and for nothing else.

A link goes from one rank to another in one direction of the pipeline and holds some messages. A
send waits for room, or for a receiver that stands at a receive of the link.

    rows = [[((0, 1, "F"), True)], [((0, 1, "F"), False)]]
    assert run_links(rows, send_buffers=0) == [1, 1]
"""

from collections import Counter
from collections.abc import Sequence
from typing import final

# Sending rank, receiving rank, and direction ("F" activations or "B" gradients).
Link = tuple[int, int, str]
# A transfer: its link, and whether it is the send.
LinkPost = tuple[Link, bool]


def run_links(rows: Sequence[Sequence[LinkPost | None]], send_buffers: int) -> list[int]:
    """How many actions of each row are done when no rank can go on; None is no transfer."""
    run = _LinkRun(rows, send_buffers)
    # A list, not a generator: every rank gets its turn in each round.
    while any([run.advance(rank) for rank in range(len(rows))]):
        pass
    return run.at


@final
class _LinkRun:
    def __init__(self, rows: Sequence[Sequence[LinkPost | None]], send_buffers: int) -> None:
        self.at = [0] * len(rows)
        self._rows, self._send_buffers = rows, send_buffers
        self._under_way: Counter[Link] = Counter()

    def advance(self, rank: int) -> bool:
        """Let `rank` run as far as it can; whether it moved."""
        start = self.at[rank]
        while self.at[rank] < len(self._rows[rank]) and self._perform(rank):
            self.at[rank] += 1
        return self.at[rank] > start

    def _perform(self, rank: int) -> bool:
        post = self._rows[rank][self.at[rank]]
        if post is None:
            return True
        link, sends = post
        if sends:
            if self._under_way[link] >= self._send_buffers + int(self._receives(link)):
                return False
            self._under_way[link] += 1
            return True
        if not self._under_way[link]:
            return False
        self._under_way[link] -= 1
        return True

    def _receives(self, link: Link) -> bool:
        """Whether the receiver of `link` stands at its receive."""
        receiver = link[1]
        row, at = self._rows[receiver], self.at[receiver]
        return at < len(row) and row[at] == (link, False)

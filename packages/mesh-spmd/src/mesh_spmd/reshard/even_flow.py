"""The least that the busiest sender of a list can send, by max-flow over holders of cells.

Dealing out one cell after another may end above it where cells share holders in a chain. Here what
the busiest ranks send goes on, over all chains of cells, to ranks that send less, until those that
still send too much have nobody below them: their mean is then the least for the busiest.

    rows = [Row(holders=(0, 1), shares=[6, 0]), Row(holders=(1, 2), shares=[3, 0])]
    EvenFlow(loads=[6, 3, 0], rows=rows).run()     # loads 3, 3, 3; shares [3, 3] and [0, 3]

Levels and blocking flows are those of Dinic (1970).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Row:
    """Who can send what others need of one cell, and how much of it each of them does."""

    holders: Sequence[int]
    shares: list[int]


class EvenFlow:
    """Changes the shares of rows, and loads with them; `run` is all there is to call.

    Args:
        loads: what each rank sends: its shares of the rows, and what it alone can send.
        rows: with holders below the number of ranks.
    """

    def __init__(self, *, loads: list[int], rows: Sequence[Row]) -> None:
        self.loads = loads
        self._rows = rows
        self._held: list[list[tuple[int, int]]] = [[] for _ in loads]  # row, and position in it
        for number, row in enumerate(rows):
            for position, rank in enumerate(row.holders):
                self._held[rank].append((number, position))

    def run(self) -> None:
        """Make the largest load the least that is possible."""
        closed: Collection[int] = range(len(self.loads))
        while closed:
            limit = -(-sum(self.loads[rank] for rank in closed) // len(closed))
            while self._push(limit):
                pass
            # Nobody whom these reach is below the limit, so their mean is above it.
            levels, _ = self._levels(limit)
            closed = [rank for rank, level in enumerate(levels) if level >= 0]

    def _over(self, limit: int) -> list[int]:
        return [rank for rank, load in enumerate(self.loads) if load > limit]

    def _levels(self, limit: int) -> tuple[list[int], bool]:
        """How many rows lie between ranks above the limit and each rank; -1 where none lead to it.

        Ends at the first level that has a rank below the limit, and says whether there is one.
        """
        levels = [-1] * len(self.loads)
        seen = [False] * len(self._rows)
        front, found = self._over(limit), False
        for rank in front:
            levels[rank] = 0
        while front and not found:
            ahead = []
            for rank in front:
                for number, position in self._held[rank]:
                    row = self._rows[number]
                    if seen[number] or not row.shares[position]:
                        continue
                    seen[number] = True
                    new = [other for other in row.holders if levels[other] < 0]
                    for other in new:
                        levels[other] = levels[rank] + 1
                        found = found or self.loads[other] < limit
                    ahead += new
            front = ahead
        return levels, found

    def _push(self, limit: int) -> bool:
        """Move load from ranks above the limit to those below, over the fewest rows; if any can."""
        levels, found = self._levels(limit)
        loads, rows = self.loads, self._rows
        next_arc = [(0, 0)] * len(loads)
        for rank in self._over(limit) if found else ():
            while loads[rank] > limit:
                path = self._path(rank, limit, levels, next_arc)
                if not path:
                    break
                last = rows[path[-1][0]].holders[path[-1][2]]
                given = min(rows[number].shares[giver] for number, giver, _ in path)
                given = min(given, loads[rank] - limit, limit - loads[last])
                for number, giver, taker in path:
                    rows[number].shares[giver] -= given
                    rows[number].shares[taker] += given
                loads[rank] -= given
                loads[last] += given
        return found

    def _path(
        self, begin: int, limit: int, levels: list[int], next_arc: list[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """Rows with giver and taker, from a rank up the levels to one below the limit, or none.

        Arcs that lead nowhere are not tried again.
        """
        path: list[tuple[int, int, int]] = []
        here = begin
        while not path or self.loads[here] >= limit:
            arc = self._arc(here, levels, next_arc)
            if arc is not None:
                path.append(arc)
                here = self._rows[arc[0]].holders[arc[2]]
            elif path:
                number, giver, taker = path.pop()
                here = self._rows[number].holders[giver]
                next_arc[here] = next_arc[here][0], taker + 1
            else:
                break
        return path

    def _arc(
        self, here: int, levels: list[int], next_arc: list[tuple[int, int]]
    ) -> tuple[int, int, int] | None:
        index, first = next_arc[here]
        for at in range(index, len(self._held[here])):
            number, giver = self._held[here][at]
            row = self._rows[number]
            if row.shares[giver]:
                for taker in range(first, len(row.holders)):
                    if levels[row.holders[taker]] == levels[here] + 1:
                        next_arc[here] = at, taker
                        return number, giver, taker
            first = 0
        next_arc[here] = len(self._held[here]), 0
        return None

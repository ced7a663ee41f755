"""A faster order of a schedule's computations, by moving single ones, within a memory cap.

What can be made faster lies on the critical path: the chain of computations, each waiting for the
one before, that ends last. A move takes one of them to another place in its rank's row, and is kept
unless it makes the schedule slower, beyond a threshold that shrinks to nothing. Microbatches are
alike, so a row is a list of kinds and stages, and numbers follow from the order.

Decided by a seed and by sums alone, never by a clock or a library of mathematics, so that all ranks
find the same order.

    search = OrderSearch(zbv(2, 3), costs, memory_cap_bytes=6)
    rows = search.run(tries=1000, threshold=0.01, seed=0).rows
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple, final

from moe_pipeline.errors import ScheduleError
from moe_pipeline.schedules.generators import Found
from moe_pipeline.schedules.table import Action, Kind, Schedule, StageCosts

_F, _I, _W = range(3)
_KIND_OF_CODE = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
_CODES = {
    Kind.FORWARD: (_F,),
    Kind.INPUT_GRADIENT: (_I,),
    Kind.WEIGHT_GRADIENT: (_W,),
    Kind.BACKWARD: (_I, _W),
}
# How far a move goes; most go to an earlier place.
_STEPS = (-1, -1, -1, -1, -2, -2, -3, -4, -6, 1, 1, 2, 3)
# Share of moves in which the two change places: where memory is full, nothing else may be moved.
_EXCHANGES = 0.4
# A row: for each computation 3 * stage + kind.
_Row = list[int]


def _code(stage: int, kind: int) -> int:
    return 3 * stage + kind


class _Timing(NamedTuple):
    """When a schedule ends, and its critical path, as ranks and places in their rows."""

    makespan_s: float
    critical: list[tuple[int, int]]


@final
class OrderSearch:
    """Looks for faster orders of a schedule's rows; stages stay on their ranks.

    Args:
        schedule: legal, within the cap, each stage on one rank; whole backwards are split.
        costs: of each stage.
        memory_cap_bytes: for the activations of each rank.
    """

    def __init__(
        self, schedule: Schedule, costs: Sequence[StageCosts], *, memory_cap_bytes: int
    ) -> None:
        self._cap = memory_cap_bytes
        self._rows = [
            [_code(a.stage, kind) for a in row for kind in _CODES.get(a.kind, ())]
            for row in schedule.ranks
        ]
        rank_of = {code // 3: rank for rank, row in enumerate(self._rows) for code in row}
        self._duration: list[float] = []
        self._change: list[int] = []  # of the bytes held
        for c in costs:
            self._duration += [c.forward_s, c.input_gradient_s, c.weight_gradient_s]
            kept = c.left_for_weights
            self._change += [c.activation_bytes, kept - c.activation_bytes, -kept]
        # By code what a computation takes from another stage, and how long that travels.
        self._source: list[tuple[int, float] | None] = [None] * len(self._duration)
        for stage in range(schedule.num_stages - 1):
            apart = rank_of[stage] != rank_of[stage + 1]
            there = costs[stage].forward_transfer_s if apart else 0.0
            back = costs[stage + 1].backward_transfer_s if apart else 0.0
            self._source[_code(stage + 1, _F)] = (_code(stage, _F), there)
            self._source[_code(stage, _I)] = (_code(stage + 1, _I), back)

    def run(self, *, tries: int, threshold: float, seed: int) -> Found:
        """The fastest order found.

        Args:
            tries: moves to look at.
            threshold: by what share of the makespan a move may make it slower at first.
            seed: of the moves.

        Raises:
            ScheduleError: the schedule's own order waits for ever.
        """
        rows, random = [list(row) for row in self._rows], Random(seed)
        now = self._time(rows)
        if now is None:
            raise ScheduleError("an order to begin with waits for ever; `check` says why")
        best_s, best = now.makespan_s, list(rows)
        for turn in range(tries):
            rank, place = now.critical[int(random.random() * len(now.critical))]
            row = self._moved(rows[rank], place, random)
            if row is None:
                continue
            before, rows[rank] = rows[rank], row
            found = self._time(rows)
            slack = best_s * threshold * (tries - turn) / tries
            if found is None or found.makespan_s > now.makespan_s + slack * random.random():
                rows[rank] = before
                continue
            now = found
            if now.makespan_s < best_s:
                best_s, best = now.makespan_s, list(rows)
        return Found(best_s, [list(_numbered(row)) for row in best])

    def _moved(self, row: _Row, place: int, random: Random) -> _Row | None:
        """The row with one computation elsewhere; None: nothing changes, or it may not be."""
        to = place + _STEPS[int(random.random() * len(_STEPS))]
        low, high = min(place, to), max(place, to)
        if low < 0 or high >= len(row) or row[place] == row[to]:
            return None
        changed = list(row)
        if random.random() < _EXCHANGES:
            changed[place], changed[to] = row[to], row[place]
        else:
            changed.insert(to, changed.pop(place))
        done: dict[int, int] = {}
        held = 0
        for code in changed:
            count = done.get(code, 0)
            if code % 3 and done.get(code - 1, 0) <= count:
                return None  # I before its F, or W before its I
            done[code] = count + 1
            held += self._change[code]
            if held > self._cap:
                return None
        return changed

    def _time(self, rows: list[_Row]) -> _Timing | None:
        """Follow the rows in time; None if they wait for each other."""
        clock = _Clock(rows, self._duration, self._source)
        while any([clock.advance(rank) for rank in range(len(rows))]):
            pass
        if any(at < len(row) for at, row in zip(clock.at, rows, strict=True)):
            return None
        slowest = max(range(len(rows)), key=clock.now.__getitem__)
        last = (slowest, clock.at[slowest] - 1)
        return _Timing(clock.now[slowest], list(_chain(last, clock.causes)))


@final
class _Clock:
    """How far each rank is in its row, and what each computation waited for."""

    def __init__(
        self, rows: list[_Row], duration: list[float], source: list[tuple[int, float] | None]
    ) -> None:
        self._rows, self._duration, self._source = rows, duration, source
        self.at, self.now = [0] * len(rows), [0.0] * len(rows)
        # The one before on the rank, or one of a neighbour; None: nothing.
        self.causes: list[list[tuple[int, int] | None]] = [[] for _ in rows]
        # By code when each microbatch's ended, and where.
        self._ended: list[list[tuple[float, tuple[int, int]]]] = [[] for _ in duration]

    def advance(self, rank: int) -> bool:
        """Go on in a row as far as inputs are known; whether that was anywhere."""
        row, place, now, causes = self._rows[rank], self.at[rank], self.now[rank], self.causes[rank]
        begin = place
        while place < len(row):
            code = row[place]
            ended, source = self._ended[code], self._source[code]
            cause = (rank, place - 1) if place else None
            if source is not None:
                before = self._ended[source[0]]
                if len(before) <= len(ended):
                    break
                end, maker = before[len(ended)]
                if end + source[1] > now:
                    now, cause = end + source[1], maker
            now += self._duration[code]
            ended.append((now, (rank, place)))
            causes.append(cause)
            place += 1
        self.at[rank], self.now[rank] = place, now
        return place > begin


def _chain(
    last: tuple[int, int], causes: list[list[tuple[int, int] | None]]
) -> Iterator[tuple[int, int]]:
    """The computations that wait for each other, from the last one on."""
    at: tuple[int, int] | None = last
    while at is not None:
        yield at
        at = causes[at[0]][at[1]]


def _numbered(row: _Row) -> Iterator[Action]:
    """Actions with their microbatches."""
    counts: dict[int, int] = {}
    for code in row:
        counts[code] = counts.get(code, 0) + 1
        yield Action(code // 3, _KIND_OF_CODE[code % 3], counts[code] - 1)

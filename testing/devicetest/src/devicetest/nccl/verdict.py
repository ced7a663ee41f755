"""Which of the queued operations can never end, and the sentence that says why.

An operation may end if those before it in its queue may, and if its other side may be launched:
because it is queued and may be, or because its rank still goes on and may queue it. A rank does not
go on that waits for an operation which may not end. What is left after that is a deadlock.

    find_stuck(referee, waiting={0: {3}}, gone=set())
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from devicetest.nccl.referee import Item, Part, Referee

Transfer = tuple[str, str, int, int, int]  # communicator, lane, sender, receiver, its number


class _Table:
    """The queued operations, those before each, and who has the other side."""

    def __init__(self, referee: Referee) -> None:
        self.items = list(referee.items())
        self.before: dict[int, Item] = {}
        self.sides: dict[Transfer, dict[str, Item]] = defaultdict(dict)
        self.sizes: dict[Transfer, int] = {}
        self.transfers: dict[tuple[int, int], Transfer] = {}
        self.rounds: dict[tuple[str, int], dict[int, Item]] = defaultdict(dict)
        self.entered: dict[tuple[int, int], tuple[str, int]] = {}
        self._counts: dict[object, int] = defaultdict(int)
        self._counts.update({("round", *key): n for key, n in referee.entered.items()})
        for ends, channel in referee.channels.items():
            for kind, seats in (("send", channel.sends), ("recv", channel.receives)):
                for item, index in seats:
                    self._seat_transfer(item, index, kind, ends)
        for name, rounds in referee.rounds.items():
            for number, entered in enumerate(rounds):
                for item, index in entered.values():
                    self._seat_collective(item, index, (name, number))
        last: dict[tuple[str, str, int], Item] = {}
        for item in self.items:
            key = (*item.comm.line(item.lane), item.rank)
            if key in last:
                self.before[item.number] = last[key]
                self._seat(item)
            last[key] = item

    def _seat(self, item: Item) -> None:
        """Give an operation that has not been launched its place among its likes."""
        name = item.comm.name
        for index, part in enumerate(item.parts):
            if part.peer < 0:
                number = self._next(("round", name, item.rank))
                self._seat_collective(item, index, (name, number))
                continue
            ends = (item.rank, part.peer) if part.kind == "send" else (part.peer, item.rank)
            self._seat_transfer(item, index, part.kind, (name, item.lane, *ends))

    def _seat_transfer(
        self, item: Item, index: int, kind: str, ends: tuple[str, str, int, int]
    ) -> None:
        key = (*ends, self._next((*ends, kind)))
        self.transfers[item.number, index] = key
        self.sides[key][kind] = item
        if kind == "send":
            self.sizes[key] = item.parts[index].num_bytes

    def _seat_collective(self, item: Item, index: int, key: tuple[str, int]) -> None:
        self.entered[item.number, index] = key
        self.rounds[key][item.rank] = item

    def _next(self, key: object) -> int:
        number = self._counts[key]
        self._counts[key] += 1
        return number


class _Future:
    """Which operations may still end; grows until nothing is added."""

    def __init__(
        self, table: _Table, waiting: Mapping[int, set[int]], gone: AbstractSet[int]
    ) -> None:
        self._table, self._gone = table, gone
        on = {item.number for item in table.items}
        self._held = {rank: numbers & on for rank, numbers in waiting.items()}
        self.may: set[int] = set()

    def grow(self) -> bool:
        """Add what may end if those so far do; whether there was anything."""
        before = len(self.may)
        for item in self._table.items:
            if item.number not in self.may and self._may_launch(item) and self._may_end(item):
                self.may.add(item.number)
        return len(self.may) > before

    def _goes_on(self, rank: int) -> bool:
        return rank not in self._gone and self._held.get(rank, set()) <= self.may

    def _may_launch(self, item: Item) -> bool:
        before = self._table.before.get(item.number)
        return before is None or before.number in self.may

    def _may_end(self, item: Item) -> bool:
        return all(
            index in item.brought or self._part_may_end(item, index, part)
            for index, part in enumerate(item.parts)
        )

    def _part_may_end(self, item: Item, index: int, part: Part) -> bool:
        if part.peer < 0:
            seats = self._table.rounds[self._table.entered[item.number, index]]
            return all(self._may_join(rank, seats.get(rank)) for rank in item.comm.ranks)
        key = self._table.transfers[item.number, index]
        if part.kind == "recv":
            return self._may_join(part.peer, self._table.sides[key].get("send"))
        if self._may_join(part.peer, self._table.sides[key].get("recv")):
            return True
        return self._may_be_kept(key, item.comm.buffer_bytes)

    def _may_be_kept(self, key: Transfer, limit: float) -> bool:
        """Whether a send fits into the buffer beside those before it that nobody will receive."""
        total = 0
        for number in range(key[-1]):
            earlier = (*key[:4], number)
            size = self._table.sizes[earlier]
            if size <= limit and not self._may_join(key[3], self._table.sides[earlier].get("recv")):
                total += size
        return total + self._table.sizes[key] <= limit

    def _may_join(self, rank: int, item: Item | None) -> bool:
        return self._goes_on(rank) if item is None else self._may_launch(item)


def find_stuck(referee: Referee, *, waiting: Mapping[int, set[int]], gone: AbstractSet[int]) -> str:
    """Return who waits for whom for ever, "" if nobody does.

    Args:
        waiting: rank -> numbers of the items for which its host waits.
        gone: ranks whose process has ended.
    """
    table = _Table(referee)
    future = _Future(table, waiting, gone)
    while future.grow():
        pass
    stuck = [item for item in table.items if item.number not in future.may]
    return _sentence(stuck, table, waiting, gone) if stuck else ""


def _sentence(
    stuck: list[Item],
    table: _Table,
    waiting: Mapping[int, set[int]],
    gone: AbstractSet[int],
) -> str:
    lines = []
    for item in stuck:
        before = table.before.get(item.number)
        if before is None:
            lines.append(f"rank {item.rank} is in {item}; {_awaited(item, table, gone)}")
        elif item.number in waiting.get(item.rank, set()):
            lines.append(f"rank {item.rank} waits for {item}, queued behind {before}")
    for rank, numbers in sorted(waiting.items()):
        held = [item for item in stuck if item.number in numbers]
        lines += [f"the host of rank {rank} waits for its {item}" for item in held[:1]]
    return "deadlock under NCCL's order:\n  " + "\n  ".join(lines)


def _awaited(item: Item, table: _Table, gone: AbstractSet[int]) -> str:
    told = []
    for index, part in enumerate(item.parts):
        if index in item.brought:
            continue
        if part.peer < 0:
            seats = table.rounds[table.entered[item.number, index]]
            absent = [rank for rank in item.comm.ranks if rank not in seats]
            behind = [rank for rank, seat in seats.items() if seat.number in table.before]
            told += [f"rank {rank} has not called it" for rank in absent]
            told += [f"rank {rank} has it behind {_head(seats[rank], table)}" for rank in behind]
            continue
        want = "recv" if part.kind == "send" else "send"
        other = table.sides[table.transfers[item.number, index]].get(want)
        if part.peer in gone:
            told.append(f"rank {part.peer} is gone")
        elif other is None:
            told.append(f"rank {part.peer} has no such {want} queued in this communicator's order")
        else:
            told.append(f"rank {part.peer} has its {want} behind {_head(other, table)}")
    return "; ".join(told)


def _head(item: Item, table: _Table) -> str:
    while item.number in table.before:
        item = table.before[item.number]
    return str(item)

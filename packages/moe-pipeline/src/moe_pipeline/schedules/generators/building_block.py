"""From the slots of one microbatch to a schedule: repeat, reorder, squeeze (arXiv 2405.15362).

A block says for each rank of a V in which slot it runs F of its first stage, F and I of its second
and I of its first stage. Microbatches follow each other every six slots, and weight gradients take
the slots that are free. While the pipeline fills and drains there is room: there actions move to
earlier slots, as long as no rank ever holds more than the repeated block does at its peak.

    rows = rows_of_block([(0, 1, 2, 3)], num_microbatches=2)  # one rank
"""

from collections import deque
from collections.abc import Sequence
from typing import final

from moe_pipeline.schedules.table import Action, Kind, Schedule, simulate

# Slots of F of the first stage, F of the second, I of the second, I of the first.
Block = tuple[int, int, int, int]
PERIOD = 6
_WEIGHT = 4
# (kind as an index into a block or _WEIGHT, microbatch, chunk)
_Op = tuple[int, int, int]
_KINDS = (Kind.FORWARD, Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.INPUT_GRADIENT)
_CHUNKS = (0, 1, 1, 0)


def rows_of_block(
    blocks: Sequence[Block],
    num_microbatches: int,
    *,
    period: int = PERIOD,
    limit: int | None = None,
) -> list[list[Action]]:
    """The computations of each rank, in order; stage s of the V is on rank s or 2 p - 1 - s.

    Args:
        blocks: of each rank; no two of a rank's slots may be equal modulo `period`.
        num_microbatches: at least 1.
        period: slots between microbatches; more than six leave idle ones, for less memory.
        limit: activations that a rank may hold; None, or less than that: what the block needs.
    """
    grids = [_Grid(block, num_microbatches, period) for block in blocks]
    limit = max(limit or 0, *(grid.peak() for grid in grids))
    for grid in grids:
        grid.put_weights()
    first_end, last_start = _steady(grids)
    for slot, rank, op in _in_order(grids):
        if not first_end <= slot <= last_start:
            grids[rank].advance(op, _ready(grids, rank, op), limit)
    _squeeze(grids)
    # Weight gradients are taken out and filled in last, so that input gradients may go before them.
    for grid in grids:
        grid.drop_weights()
    _, last_start = _steady(grids)
    for slot, rank, op in _in_order(grids):
        if slot > last_start:
            grids[rank].advance_filling(op, _ready(grids, rank, op), limit)
    for grid in grids:
        grid.put_weights()
    return _rows(grids)


@final
class _Grid:
    """One rank's slots: which operation stands where."""

    def __init__(self, block: Block, num_microbatches: int, period: int) -> None:
        self.slots: dict[_Op, int] = {}
        self.taken: dict[int, _Op] = {}
        for kind, offset in enumerate(block):
            for m in range(num_microbatches):
                self.put((kind, m, _CHUNKS[kind]), offset + period * m)

    def put(self, op: _Op, slot: int) -> None:
        old = self.slots.get(op)
        if old is not None and self.taken.get(old) == op:
            del self.taken[old]
        self.slots[op] = slot
        self.taken[slot] = op

    def weights(self) -> list[tuple[_Op, int]]:
        """Weight gradients in free slots, as early as may be, in the order of their I."""
        waiting: deque[_Op] = deque()
        found = []
        slot, end = min(self.taken), max(self.taken)
        while slot <= end or waiting:
            op = self.taken.get(slot)
            if op is None and waiting:
                found.append((waiting.popleft(), slot))
            elif op is not None and 2 <= op[0] < _WEIGHT:
                waiting.append((_WEIGHT, op[1], op[2]))
            slot += 1
        return found

    def put_weights(self) -> None:
        for op, slot in self.weights():
            self.put(op, slot)

    def drop_weights(self) -> None:
        self.slots = {op: slot for op, slot in self.slots.items() if op[0] != _WEIGHT}
        self.taken = {slot: op for op, slot in self.slots.items()}

    def peak(self) -> int:
        """The most activations held when weight gradients fill the free slots."""
        held = most = waiting = 0
        for slot in range(min(self.taken), max(self.taken) + 1):
            op = self.taken.get(slot)
            if op is None:
                if waiting:
                    waiting, held = waiting - 1, held - 1
            elif op[0] < 2:
                held += 1
                most = max(most, held)
            else:
                waiting += 1
        return most

    def advance(self, op: _Op, first: int, limit: int) -> None:
        """Move `op` to the earliest free slot from `first` on; weight gradients stay put.

        An F that moves adds to what is held from there to its old slot, others add nothing.
        """
        old = self.slots[op]
        if op[0] < 2:
            first = self._full_until(old, first, limit)
        slot = next((s for s in range(first, old) if s not in self.taken), old)
        self.put(op, slot)

    def _full_until(self, slot: int, first: int, limit: int) -> int:
        """The first slot from `first` on with room for one more activation up to `slot`."""
        held = sum(_held(op) for at, op in self.taken.items() if at < slot)
        while slot > first and held < limit:
            slot -= 1
            op = self.taken.get(slot)
            if op is not None:
                held -= _held(op)
        return slot if held < limit else slot + 1

    def advance_filling(self, op: _Op, first: int, limit: int) -> None:
        """Move `op` to the earliest free slot that keeps `peak` within `limit`."""
        old = self.slots[op]
        for slot in range(first, old):
            if slot not in self.taken:
                self.put(op, slot)
                if self.peak() <= limit:
                    return
                self.put(op, old)


def _held(op: _Op) -> int:
    return (op[0] < 2) - (op[0] == _WEIGHT)


def _steady(grids: list[_Grid]) -> tuple[int, int]:
    """From the first end of a microbatch to the last start of one: slots that stay as they are."""
    slots = grids[0].slots
    last = max(m for kind, m, _ in slots if kind == 0)
    return slots[3, 0, 0], slots[0, last, 0]


def _in_order(grids: list[_Grid]) -> list[tuple[int, int, _Op]]:
    """(slot, rank, operation), by slot."""
    return sorted((slot, rank, op) for rank, g in enumerate(grids) for op, slot in g.slots.items())


def _ready(grids: list[_Grid], rank: int, op: _Op) -> int:
    """The slot after everything that `op` needs, and after the same of the microbatch before."""
    kind, m, chunk = op
    slots = grids[rank].slots
    before = -1 if m == 0 else slots[kind, m - 1, chunk]
    if kind == _WEIGHT:
        return max(before, slots[3 - chunk, m, chunk]) + 1
    source = rank - 1 if kind in (0, 2) else rank + 1
    if 0 <= source < len(grids):
        before = max(before, grids[source].slots[op])
    if kind:
        before = max(before, slots[kind - 1, m, _CHUNKS[kind - 1]])
    return before + 1


def _rows(grids: list[_Grid]) -> list[list[Action]]:
    rows = []
    for rank, grid in enumerate(grids):
        stages = (rank, 2 * len(grids) - 1 - rank)
        rows.append(
            [
                Action(stages[chunk], Kind.WEIGHT_GRADIENT if kind == _WEIGHT else _KINDS[kind], m)
                for _, (kind, m, chunk) in sorted(grid.taken.items())
            ]
        )
    return rows


def _squeeze(grids: list[_Grid]) -> None:
    """Take out slots in which everybody could go on: each rank keeps its order."""
    rows = _rows(grids)
    count = max(m for _, m, _ in grids[0].slots) + 1
    schedule = Schedule(
        name="block",
        num_stages=2 * len(grids),
        num_microbatches=count,
        ranks=tuple(map(tuple, rows)),
    )
    for grid, spans in zip(grids, simulate(schedule).spans, strict=True):
        ops = [op for _, op in sorted(grid.taken.items())]
        grid.taken = {}
        for op, span in zip(ops, spans, strict=True):
            grid.slots[op] = int(span.start_s)
            grid.taken[int(span.start_s)] = op

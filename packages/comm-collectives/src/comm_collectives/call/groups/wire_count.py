"""Count the bytes that this rank sends in exchanges and gathers: what a plan promised, measured.

Padding and everything else that travels with rows is in the figures, unlike what calls compare and
the counts of rows. Backwards are counted under names of their own.

    with count_wire_bytes(group) as counted:
        sent = dispatch(x, topk_idx, topk_weights, num_experts=64, group=group)
    counted.by_call["dispatch"]        # (0, 7392, ...): bytes to each rank of the group
    counted.num_wire_bytes             # without what this rank keeps for itself
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

from comm_collectives.call.groups.groups import Group, group_state


@final
class WireBytes:
    """Bytes sent by this rank to each of the group since counting began, by name of the call."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.by_call: dict[str, tuple[int, ...]] = {}

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Bytes to each rank of the group, all calls together."""
        columns = zip(*self.by_call.values(), strict=True)
        return tuple(sum(column) for column in columns) or (0,) * self._size

    @property
    def num_wire_bytes(self) -> int:
        """Bytes to other ranks."""
        return sum(count for rank, count in enumerate(self.by_rank) if rank != self._rank)

    def add(self, name: str, sent: Sequence[int]) -> None:
        """Count one exchange: bytes to each rank."""
        known = self.by_call.get(name, (0,) * self._size)
        self.by_call[name] = tuple(map(sum, zip(known, sent, strict=True)))


@contextmanager
def count_wire_bytes(group: Group | None = None) -> Iterator[WireBytes]:
    """Count the bytes that this rank sends in `group` while the context is open. Not collective.

    Backwards count if they run inside. Counters of one group can be nested.

    Args:
        group: None is the default group.

    Raises:
        ValueError: there is no such group here.
    """
    state = group_state(group)
    counted = WireBytes(state.rank, state.size)
    state.observers.append(counted.add)
    try:
        yield counted
    finally:
        state.observers.remove(counted.add)

"""Numbers for each rank, told ahead of rows: how many come, of what kind, and whether all is well.

Counts travel behind the heads in which ranks agree anyway, so one rank's refused arguments, or rows
of another width or dtype, end the call on every rank at once, instead of leaving others to wait.

    received = exchange_counts(call, [[2, 0], [1, 3]])
    received.rows[1]       # what rank 1 has for this rank
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from comm_collectives.call.calls import Call
from comm_collectives.units import WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the peers told: `flags` of every rank or-ed together, and each peer's counts."""

    flags: int
    rows: list[list[int]]


def exchange_counts(
    call: Call,
    counts: Sequence[Sequence[int]],
    *,
    flags: int = 0,
    refused: ValueError | TypeError | None = None,
) -> Counts:
    """Send `counts[r]` to each rank r and return what each rank sent here. Collective.

    Args:
        call: the call on whose behalf; its arguments are what the ranks have to agree on.
        counts: one list per rank.
        flags: bits (below 2^32) that every rank shall know of.
        refused: what is wrong with this rank's arguments; raised on every rank.

    Raises:
        RefusedError, MismatchError: on every rank alike; see `Call.meet`.
    """
    parts = [pack_counts(row) for row in counts]
    agreed = call.meet(parts=parts, status=flags, refused=refused)
    return Counts(flags=agreed.flags, rows=[unpack_counts(part) for part in agreed.parts])


def pack_counts(counts: Sequence[int]) -> bytes:
    """Return counts as a part of a frame."""
    return struct.pack(f"<{len(counts)}q", *counts)


def unpack_counts(part: bytes) -> list[int]:
    """Read what `pack_counts` wrote."""
    return list(struct.unpack(f"<{len(part) // WORD_BYTES}q", part))

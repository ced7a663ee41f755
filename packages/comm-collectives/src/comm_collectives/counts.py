"""The meeting ahead of a payload: how many rows come, of what kind, and whether all is well.

Counts ride on the frame in which ranks agree anyway, so one rank's refused arguments, or rows of
another width or dtype, end the call on every rank at once, instead of leaving the others to wait.

    received = exchange_counts(call, [[2, 0], [1, 3]])
    received.rows[1]       # what rank 1 has for this rank
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.calls import Call
from comm_collectives.frames import PART_BYTES
from comm_collectives.wire import as_bytes

_WORD_BYTES = 8
_INLINE = PART_BYTES // _WORD_BYTES


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
        counts: one list per rank, all of one length, which follows from those arguments.
        flags: bits (below 2^32) that every rank shall know of.
        refused: what is wrong with this rank's arguments; raised on every rank.

    Raises:
        RefusedError, MismatchError: on every rank alike; see `Call.meet`.
    """
    width = len(counts[0])
    inline = min(width, _INLINE)
    layout = struct.Struct(f"<{inline}q")
    parts = [layout.pack(*row[:inline]) for row in counts]
    agreed = call.meet(parts=parts, status=flags, refused=refused)
    rows = [list(layout.unpack_from(part)) for part in agreed.parts]
    if width > inline:
        for row, rest in zip(rows, _exchange_rest(call, counts, inline), strict=True):
            row += rest
    return Counts(flags=agreed.flags, rows=rows)


def _exchange_rest(call: Call, counts: Sequence[Sequence[int]], start: int) -> list[list[int]]:
    """Exchange what did not fit into the frame."""
    state = call.state
    rest = [row[start:] for row in counts]
    sent = torch.tensor(rest, dtype=torch.int64, device=state.control_type)
    received = torch.empty_like(sent)
    splits = [sent.shape[1] * _WORD_BYTES] * state.size
    call.run(
        lambda: state.transport.exchange(as_bytes(received), as_bytes(sent), splits, splits),
        on_cpu=state.control_type == "cpu",
    )
    rows: list[list[int]] = received.tolist()
    return rows

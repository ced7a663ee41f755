"""The control exchange ahead of rows: how many come, of what kind, and whether all is well.

Counts travel in the frame in which ranks agree anyway, so one rank's refused arguments, or rows of
another width or dtype, end the call on every rank at once, instead of leaving the others to wait.

    received = exchange_counts(call, [[2, 0], [1, 3]])
    received.rows[1]       # what rank 1 has for this rank

Small rows can travel in the same control exchange; see `inline_payload`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.base import as_bytes
from comm_collectives.call.calls import Call
from comm_collectives.call.inline_payload import InlinePayload, InlineRows
from comm_collectives.call.signature import INLINE_BYTES, Status
from comm_collectives.units import WORD_BYTES

_INLINE = INLINE_BYTES // WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the peers told: `flags` of every rank or-ed together, and each peer's counts.

    Attributes:
        inline: the rows that came along; None if they have an exchange of their own.
    """

    flags: int
    rows: list[list[int]]
    inline: InlineRows | None = None


def exchange_counts(
    call: Call,
    counts: Sequence[Sequence[int]],
    *,
    flags: int = 0,
    refused: ValueError | TypeError | None = None,
    inline: InlinePayload | None = None,
) -> Counts:
    """Send `counts[r]` to each rank r and return what each rank sent here. Collective.

    Args:
        call: the call on whose behalf; its arguments are what the ranks have to agree on.
        counts: one list per rank, all of one length, which follows from those arguments.
        flags: bits (below 2^32) that every rank shall know of.
        refused: what is wrong with this rank's arguments; raised on every rank.
        inline: this rank's rows, if they can travel along; every rank gives one, or none does.

    Raises:
        RefusedError, MismatchError: on every rank alike; see `Call.meet`.
    """
    page = None
    if inline is not None:
        counts = [[at, *row] for at, row in zip(inline.at, counts, strict=True)]
        flags, page = flags | inline.flags, inline.page
    width = len(counts[0])
    fitting = min(width, _INLINE)
    layout = struct.Struct(f"<{fitting}q")
    parts = [layout.pack(*row[:fitting]) for row in counts]
    if inline is not None and inline.parts is not None:
        parts = [words + rows for words, rows in zip(parts, inline.parts, strict=True)]
    agreed = call.meet(parts=parts, status=flags, refused=refused, page=page)
    if agreed.flags & Status.WANTS_PAGES:
        call.open_pages()
    rows = [list(layout.unpack_from(part)) for part in agreed.parts]
    if width > fitting:
        for row, rest in zip(rows, _exchange_rest(call, counts, fitting), strict=True):
            row += rest
    if inline is None:
        return Counts(flags=agreed.flags, rows=rows)
    at = [row.pop(0) for row in rows]
    if agreed.flags & Status.NOT_INLINE:
        return Counts(flags=agreed.flags, rows=rows)
    told = [part[layout.size :] for part in agreed.parts]
    return Counts(flags=agreed.flags, rows=rows, inline=InlineRows(at=at, parts=told))


def _exchange_rest(call: Call, counts: Sequence[Sequence[int]], start: int) -> list[list[int]]:
    """Exchange what did not fit into the frame."""
    state = call.state
    rest = [row[start:] for row in counts]
    sent = torch.tensor(rest, dtype=torch.int64, device=state.control_type)
    received = torch.empty_like(sent)
    splits = [sent.shape[1] * WORD_BYTES] * state.size
    call.run(
        lambda: state.transport.exchange(as_bytes(received), as_bytes(sent), splits, splits),
        on_cpu=state.control_type == "cpu",
    )
    rows: list[list[int]] = received.tolist()
    return rows

"""Where every routed row stands on the wire and among the local experts: pure numbers, no tensors.

Rows travel grouped by peer. Behind the rows for one peer come a few *gap* rows, which hold those
rows' routing weights as raw bytes, so that rows and weights need a single exchange:

    to rank 0: row row row | gap      to rank 1: row row | gap      ...

Legend: W ranks, L local experts per rank, P per-peer, B blocks (one per source rank and local
expert, by source rank first). "Shift" of a row: its position minus its running number.

    plan = plan_routing([[2, 0], [1, 3]], [[2, 0], [0, 4]], weights_per_row=64, alignment=1)
    plan.num_tokens_per_expert      # (2, 4)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSide:
    """One direction of the wire: rows and gap rows per peer, and the shifts of rows and weights."""

    rows_P: tuple[int, ...]
    gaps_P: tuple[int, ...]
    row_shift_P: tuple[int, ...]
    weight_shift_P: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all peers, without gap rows."""
        return sum(self.rows_P)

    @property
    def wire_rows_P(self) -> tuple[int, ...]:
        """Rows and gap rows together, per peer."""
        return tuple(n + gap for n, gap in zip(self.rows_P, self.gaps_P, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPlan:
    """The whole exchange as this rank sees it.

    `block_rows_B` and `local_shift_B` say where the received rows go among the local experts: a row
    with running number j of block b stands at j + local_shift_B[b], expert by expert, inside an
    expert by source rank and then in the source's order, each expert padded to the alignment.
    """

    source: WireSide
    expert: WireSide
    num_tokens_per_expert: tuple[int, ...]
    block_rows_B: tuple[int, ...]
    local_shift_B: tuple[int, ...]

    @property
    def num_local_rows(self) -> int:
        """Rows of the local experts, padding included."""
        return sum(self.num_tokens_per_expert)

    @property
    def is_padded(self) -> bool:
        """Whether any expert has padding rows."""
        return self.num_local_rows != self.expert.num_rows


def plan_routing(
    sent_WL: Sequence[Sequence[int]],
    received_WL: Sequence[Sequence[int]],
    *,
    weights_per_row: int,
    alignment: int,
) -> RoutingPlan:
    """Plan one dispatch from the counts that this rank sends and receives.

    Args:
        sent_WL: rows that this rank has for each expert of each rank.
        received_WL: rows that each rank has for each expert of this rank.
        weights_per_row: how many routing weights fit into the bytes of one row on the wire.
        alignment: each local expert's number of rows is rounded up to a multiple of this.
    """
    num_local = len(received_WL[0])
    padded_L = tuple(
        round_up(sum(row[e] for row in received_WL), alignment) for e in range(num_local)
    )
    local_shift_B: list[int] = []
    next_L = starts(padded_L)
    running = 0
    for row in received_WL:
        for e, count in enumerate(row):
            local_shift_B.append(next_L[e] - running)
            next_L[e] += count
            running += count
    return RoutingPlan(
        source=_wire_side([sum(row) for row in sent_WL], weights_per_row),
        expert=_wire_side([sum(row) for row in received_WL], weights_per_row),
        num_tokens_per_expert=padded_L,
        block_rows_B=tuple(count for row in received_WL for count in row),
        local_shift_B=tuple(local_shift_B),
    )


def round_up(count: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is at least `count`."""
    return -(-count // alignment) * alignment


def starts(lengths: Sequence[int]) -> list[int]:
    """Return where each of consecutive pieces begins."""
    return list(accumulate(lengths, initial=0))[:-1]


def _wire_side(rows_P: Sequence[int], weights_per_row: int) -> WireSide:
    gaps_P = [-(-n // weights_per_row) for n in rows_P]
    row_shift_P = starts(gaps_P)
    weight_shift_P = [
        (first + shift + n) * weights_per_row - first
        for first, shift, n in zip(starts(rows_P), row_shift_P, rows_P, strict=True)
    ]
    return WireSide(
        rows_P=tuple(rows_P),
        gaps_P=tuple(gaps_P),
        row_shift_P=tuple(row_shift_P),
        weight_shift_P=tuple(weight_shift_P),
    )

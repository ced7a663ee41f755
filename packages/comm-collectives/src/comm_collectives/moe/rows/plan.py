"""Where every routed row stands on the wire and among the local experts: pure numbers, no tensors.

On the flat route rows travel grouped by peer. Where weights travel along, a few *gap* rows stand
behind the rows for one peer and hold their routing weights as raw bytes, so that rows and weights
need a single exchange:

    to rank 0: row row row | gap      to rank 1: row row | gap      ...

Legend: W ranks, L local experts per rank, P per-peer, B blocks (one per source rank and local
expert). "Shift" of a row: its position minus its running number.

    placing = plan_placing([[2, 0], [0, 4]], alignment=1)
    placing.num_tokens_per_expert                       # (2, 4)
    plan_wire([2, 4], weights_per_row=64).wire_rows_P   # (3, 5)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from comm_collectives.units import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSide:
    """One direction of the wire: rows and gap rows per peer, and the shifts of rows and weights."""

    rows_P: tuple[int, ...]
    gaps_P: tuple[int, ...]
    row_shift_P: tuple[int, ...]
    weight_shift_P: tuple[int, ...]

    @property
    def wire_rows_P(self) -> tuple[int, ...]:
        """Rows and gap rows together, per peer."""
        return tuple(n + gap for n, gap in zip(self.rows_P, self.gaps_P, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Where received choices go among the experts that they are for.

    Choice j (a running number) of block b stands at j + local_shift_B[b]: expert by expert, inside
    an expert by source and then in the source's order, each expert padded to the alignment. Blocks
    are in the order of the wire.
    """

    num_tokens_per_expert: tuple[int, ...]
    block_rows_B: tuple[int, ...]
    local_shift_B: tuple[int, ...]

    @property
    def num_choices(self) -> int:
        """Choices received, padding not counted."""
        return sum(self.block_rows_B)

    @property
    def num_rows(self) -> int:
        """Places of all experts, padding included."""
        return sum(self.num_tokens_per_expert)

    @property
    def is_padded(self) -> bool:
        """Whether any expert has padding rows."""
        return self.num_rows != self.num_choices


def plan_placing(
    received_WL: Sequence[Sequence[int]],
    *,
    alignment: int,
    blocks: Iterable[tuple[int, int]] | None = None,
) -> Placing:
    """Plan where received choices go.

    Args:
        received_WL: choices that each source has for each local expert.
        alignment: each local expert's number of rows is rounded up to a multiple of this.
        blocks: (source, expert) of each block in the order of the wire; None: source by source.
    """
    sums_L = map(sum, zip(*received_WL, strict=True))
    padded_L = tuple(round_up(count, alignment) for count in sums_L)
    next_L = starts(padded_L)
    first_WL: list[list[int]] = []
    for row in received_WL:
        first_WL.append(next_L)
        next_L = [at + count for at, count in zip(next_L, row, strict=True)]
    if blocks is None:
        block_rows_B = [count for row in received_WL for count in row]
        first_B = [at for row in first_WL for at in row]
    else:
        order = list(blocks)
        block_rows_B = [received_WL[source][expert] for source, expert in order]
        first_B = [first_WL[source][expert] for source, expert in order]
    running_B = starts(block_rows_B)
    return Placing(
        num_tokens_per_expert=padded_L,
        block_rows_B=tuple(block_rows_B),
        local_shift_B=tuple(at - n for at, n in zip(first_B, running_B, strict=True)),
    )


def plan_wire(rows_P: Sequence[int], weights_per_row: int) -> WireSide:
    """Plan the wire for `rows_P` rows per peer, whose weights stand in gap rows behind them."""
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


def starts(lengths: Sequence[int]) -> list[int]:
    """Return where each of consecutive pieces begins."""
    return list(accumulate(lengths, initial=0))[:-1]

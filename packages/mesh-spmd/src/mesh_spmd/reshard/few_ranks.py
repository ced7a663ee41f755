"""The totals of a move within one mesh of few ranks, as plain numbers.

`cells.py` has a column of numbers for each question, which thousands of ranks need and a few tens
pay for. Here each dim is looked at by its pieces, and ranks only where both layouts cut a dim.

    totals = totals_of(source_tiling, target_tiling)
    totals.missing, totals.due      # as Move.totals, in elements
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mesh_spmd.reshard.tilings import Tiling

MOST_RANKS = 128  # beyond so many, columns are faster


class Totals(NamedTuple):
    """Elements by position in the mesh, but `due` by source cell; `holders` by cell."""

    held: list[int]
    wanted: list[int]
    missing: list[int]
    due: list[int]
    holders: list[list[int]]


def totals_of(source: Tiling, target: Tiling) -> Totals:
    """Return what ranks hold, want and lack of a tensor, and what is due from each source cell.

    Both tilings are of boxes on one mesh whose ranks ascend.
    """
    size = source.mesh.size
    holders, cell_of = _cells(source, size)
    _, target_of = _cells(target, size)
    held, wanted = [1], [1]
    # Of a dim that one side cuts alone, its piece is shared; the other side has all of it.
    alone, target_alone = [1], [1]
    both = []
    for dim, (before, after) in enumerate(zip(source.bounds, target.bounds, strict=True)):
        lengths = [high - low for low, high in pairwise(before)]
        target_lengths = [high - low for low, high in pairwise(after)]
        held = [numel * length for numel in held for length in lengths]
        wanted = [numel * length for numel in wanted for length in target_lengths]
        cut, target_cut = len(lengths) > 1, len(target_lengths) > 1
        if cut and target_cut:
            both.append(_shared_lengths(source, target, dim))
        shared = [1] * len(lengths) if target_cut else lengths
        alone = [numel * length for numel in alone for length in shared]
        shared = target_lengths if target_cut and not cut else [1] * len(target_lengths)
        target_alone = [numel * length for numel in target_alone for length in shared]
    kept = [alone[i] * target_alone[j] for i, j in zip(cell_of, target_of, strict=True)]
    for column in both:
        kept = [numel * length for numel, length in zip(kept, column, strict=True)]
    copies = size // len(wanted)
    due = [numel * copies for numel in held]
    for cell, own in zip(cell_of, kept, strict=True):
        due[cell] -= own
    want = [wanted[j] for j in target_of]
    return Totals(
        held=[held[i] for i in cell_of],
        wanted=want,
        missing=[all_of - own for all_of, own in zip(want, kept, strict=True)],
        due=due,
        holders=holders,
    )


def _cells(tiling: Tiling, size: int) -> tuple[list[list[int]], list[int]]:
    """The positions that hold each cell, and the cell that each position holds."""
    bases: Sequence[int] = (0,)
    for more in tiling.bases:
        if len(more) > 1:
            bases = [base + step for base in bases for step in more]
    holders = [[base + step for step in tiling.replicas] for base in bases]
    cell_of = [0] * size
    for cell, positions in enumerate(holders):
        for position in positions:
            cell_of[position] = cell
    return holders, cell_of


def _shared_lengths(source: Tiling, target: Tiling, dim: int) -> list[int]:
    """By position how many indices of a dim, which both cut, are in both of its pieces."""
    before, after = source.bounds[dim], target.bounds[dim]
    places = zip(_pieces(source, dim), _pieces(target, dim), strict=True)
    pairs = [(before[i], before[i + 1], after[j], after[j + 1]) for i, j in places]
    lengths = [
        (high if high < other_high else other_high) - (low if low > other_low else other_low)
        for low, high, other_low, other_high in pairs
    ]
    return [length if length > 0 else 0 for length in lengths]


def _pieces(tiling: Tiling, dim: int) -> list[int]:
    """By position the piece of a dim."""
    size = tiling.mesh.size
    found: list[int] = []
    for stride, count in tiling.digits[dim]:
        once = [index for index in range(count) for _ in range(stride)]
        column = once * (size // len(once))
        found = [i * count + j for i, j in zip(found, column, strict=True)] if found else column
    return found

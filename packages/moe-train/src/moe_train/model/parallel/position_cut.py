"""Which positions of a sample each rank of context parallelism has.

Every rank reads whole samples, their positions and labels, and takes its own part of them in the
stage: what depends on neighbours (the next token, the tokens of multi-token prediction, documents,
windows) is worked out before the cut, and so is exact at every border.

Invariant: runs of positions are as equal as can be, the longer ones first; more of them than
positions leave the last ones empty. Consecutive ranks have consecutive runs. Folded, twice as many
runs go forth and back, rank 0 has the first and the last: tokens that attend to few and to many.
A cut may lie within another one: tensor-parallel ranks cut the part of their context-parallel rank.

    cut = PositionCut(rank=1, size=2)
    cut.lengths(5)                       # (3, 2)
    own_BS = cut.take(position_ids_BS)   # the last 2 of 5

Shape legend: B sequences, S positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCut:
    """Part `rank` of `size` parts of every sample, or of what the cut `within` has of it."""

    rank: int
    size: int
    is_folded: bool = False
    within: "PositionCut | None" = None

    @property
    def outer(self) -> "PositionCut":
        """The cut that this one lies within; itself where it lies within none."""
        return self if self.within is None else self.within

    def spans(self, num_positions: int) -> list[list[range]]:
        """The runs of each rank."""
        if self.within is not None:
            whole = self.within.spans(num_positions)[self.within.rank]
            parts = PositionCut(rank=0, size=self.size).spans(sum(map(len, whole)))
            return [_taken(whole, part) for (part,) in parts]
        count = self.size * (2 if self.is_folded else 1)
        each, longer = divmod(num_positions, count)
        starts = [run * each + min(run, longer) for run in range(count + 1)]
        runs = [range(start, end) for start, end in pairwise(starts)]
        if not self.is_folded:
            return [[run] for run in runs]
        return [[runs[rank], runs[-1 - rank]] for rank in range(self.size)]

    def lengths(self, num_positions: int) -> tuple[int, ...]:
        """How many of `num_positions` each rank has."""
        return tuple(sum(map(len, runs)) for runs in self.spans(num_positions))

    def take(self, x_BS: Tensor) -> Tensor:
        """This rank's positions of a tensor [B, S, ...], [B, own, ...]."""
        if self.size == 1 and self.within is None:
            return x_BS
        runs = self.spans(x_BS.shape[1])[self.rank]
        parts = [x_BS.narrow(1, run.start, len(run)) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _taken(runs: Sequence[range], part: range) -> list[range]:
    """Of positions that come run after run those that are numbers of `part`."""
    found, first = [], 0
    for run in runs:
        low, high = max(part.start, first), min(part.stop, first + len(run))
        if low < high:
            found.append(run[low - first : high - first])
        first += len(run)
    return found or [runs[-1][len(runs[-1]) :]]  # nothing, behind the last one


WHOLE = PositionCut(rank=0, size=1)
"""A rank has whole samples."""

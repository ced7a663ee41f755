"""Which positions of a sample each rank of context parallelism has.

Every rank reads whole samples, their positions and labels, and takes its own part of them in the
stage: what depends on neighbours (the next token, the tokens of multi-token prediction, documents,
windows) is worked out before the cut, and so is exact at every border.

Invariant: consecutive ranks have consecutive runs, as equal as can be, the longer ones first; more
ranks than positions leave the last ones without any.

    cut = PositionCut(rank=1, size=2)
    cut.lengths(5)                       # (3, 2)
    own_BS = cut.take(position_ids_BS)   # the last 2 of 5

Shape legend: B sequences, S positions.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCut:
    """Part `rank` of `size` parts of every sample."""

    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> "PositionCut":
        """This rank's part among the ranks of a group, in its order; None: all."""
        if group is None:
            return WHOLE
        return PositionCut(rank=dist.get_rank(group), size=group.size())

    def lengths(self, num_positions: int) -> tuple[int, ...]:
        """How many of `num_positions` each rank has."""
        each, longer = divmod(num_positions, self.size)
        return tuple(each + (rank < longer) for rank in range(self.size))

    def take(self, x_BS: Tensor) -> Tensor:
        """This rank's positions of a tensor [B, S, ...], as a view [B, own, ...]."""
        lengths = self.lengths(x_BS.shape[1])
        return x_BS.narrow(1, sum(lengths[: self.rank]), lengths[self.rank])


WHOLE = PositionCut(rank=0, size=1)
"""A rank has whole samples."""

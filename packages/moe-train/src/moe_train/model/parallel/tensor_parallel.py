"""Ranks that share the heads and the inner widths of a layer, and outside of it the positions.

Between blocks each rank has its own positions (sequence parallelism, arXiv 2205.05198): norms,
residuals, routers and experts see these alone. A block gathers them, computes with this rank's
heads or columns, and sums its result over the ranks, each of which keeps its own positions of it.

Invariant: gradients of weights that the ranks share out are whole on their rank; of all others each
rank has what its own positions, or its own heads, contribute, and the sum over the ranks is whole.

    x_BSd = tp.gather(x_BPd)                     # positions of all ranks
    y_BPd = tp.summed(heads_BSi, o_proj)         # o_proj: [d, i], this rank's columns

Shape legend: B sequences, P positions of this rank, S of all ranks, d hidden size, i inner width.
"""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from comm_collectives import all_gather, reduce_scatter
from moe_train.model.parallel.position_cut import PositionCut


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """Rank `rank` of the `size` of a group, in the order of their positions.

    Args:
        group: those ranks; None where there is one.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, count: int) -> range:
        """Which of `count` heads or columns this rank has; they divide by the ranks."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def gather(self, x_BPd: Tensor) -> Tensor:
        """The positions of all ranks, [B, S, d]. Collective, also in its backward."""
        if self.size == 1:
            return x_BPd
        gathered_SBd = all_gather(x_BPd.transpose(0, 1), group=self.group)
        # Copied once: each projection would copy what is not contiguous, and keep its copy.
        return gathered_SBd.transpose(0, 1).contiguous()

    def scatter(self, x_BSd: Tensor) -> Tensor:
        """The sum over the ranks at this rank's positions, [B, P, d]. Collective, also backward."""
        if self.size == 1:
            return x_BSd
        splits = PositionCut(rank=self.rank, size=self.size).lengths(x_BSd.shape[1])
        own = reduce_scatter(x_BSd.transpose(0, 1), splits=splits, group=self.group)
        return own.transpose(0, 1)

    def summed(self, x_BSi: Tensor, projection: nn.Linear) -> Tensor:
        """`projection(x_BSi)` of the columns of all ranks, at this rank's positions. Collective."""
        if self.size == 1:
            whole: Tensor = projection(x_BSi)
            return whole
        out_BPd = self.scatter(F.linear(x_BSi, projection.weight))
        return out_BPd if projection.bias is None else out_BPd + projection.bias


ALONE = TensorParallel()

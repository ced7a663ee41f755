"""Optimizer states that are shared out: each row of a parameter is updated by one of its holders.

Every rank that holds a parameter would keep the same moments and master weights. Here each keeps
those of its own rows alone: sums of gradients go to the rank of the row (one reduce-scatter), the
ranks update their rows, and show them to each other (one all-gather); arXiv 1910.02054, "P_os".

Invariant: a row's sum is taken in the order of the ranks, as without shares, so that the same rows
get the same bits.

    shares = RowShares(group, {weight: (3, 3, 2)})       # rows of each rank of the group
    (own,) = shares.reduce_scatter([weight.grad])        # of this rank's rows
    ...                                                  # update weight[shares.own(weight)]
    shares.show()
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_collectives import all_gather, reduce_scatter
from moe_train.slices import slices_of


class RowShares:
    """Rows of parameters, and the rank of the group that updates them.

    Args:
        group: ranks that hold the same parameters.
        rows: parameter -> how many rows (of dim 0) each rank of the group has, in the order of the
            ranks; the same on all of them, zeros allowed.
        gather_group: the same ranks in the same order, for what is gathered beside sums; None:
            that group.
        is_alone: the other ranks do not exist; see `comm_collectives.simulation.stand_alone`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rows: Mapping[nn.Parameter, tuple[int, ...]],
        gather_group: dist.ProcessGroup | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self._group, self._rows, self._rank = group, dict(rows), group.rank()
        self._is_alone = is_alone
        self._gather_group = gather_group or group
        self._parts = slices_of([p.numel() for p in self._rows])

    @property
    def num_ranks(self) -> int:
        """Ranks that share the rows out."""
        return self._group.size()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the order that all ranks have."""
        return list(self._rows)

    def own(self, parameter: nn.Parameter) -> slice:
        """This rank's rows."""
        first = sum(self._rows[parameter][: self._rank])
        return slice(first, first + self._rows[parameter][self._rank])

    def reduce_scatter(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sum gradients over the ranks; return those of this rank's rows. Collective.

        Args:
            gradients: of the parameters, one dtype.
        """
        return self.start_reduce_scatter(parameters, gradients)()

    def start_reduce_scatter(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        """As `reduce_scatter`, but return what waits for the sums; the gradients may be freed."""
        pieces = [
            list(gradient.split(self._rows[parameter]))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        by_rank = [[p[rank].reshape(-1) for p in pieces] for rank in range(self._group.size())]
        flat = torch.cat([piece for own in by_rank for piece in own])
        sizes = [sum(piece.numel() for piece in own) for own in by_rank]
        shapes = [piece[self._rank].shape for piece in pieces]
        # Of the gradients' kind: a plan's have no memory, and sums that mean nothing.
        empty = [gradient.new_empty(0) for gradient in gradients]
        under_way = reduce_scatter(flat, splits=sizes, group=self._group, async_op=True)

        def found() -> list[Tensor]:
            own = zip(empty, _cut(under_way.wait(), shapes), shapes, strict=True)
            return [e.new_empty(shape).copy_(piece.view(shape)) for e, piece, shape in own]

        return found

    @torch.no_grad()
    def show(self) -> None:
        """Bring every rank's rows of the parameters to all ranks, in place. Collective."""
        parameters = self.parameters
        for part in self._parts:
            own = [p.data[self.own(p)] for p in parameters[part]]
            self.all_gather(parameters[part], own)

    def all_gather(self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor]) -> None:
        """Fill parameters from every rank's rows. Collective.

        Args:
            own: this rank's rows of each.
        """
        self.start_all_gather(parameters, own)()

    def start_all_gather(
        self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor]
    ) -> Callable[[], None]:
        """As `all_gather`, but return what waits for the rows and fills the parameters."""
        flat = torch.cat([rows.reshape(-1) for rows in own])
        rows_of_all = self._start_gather(flat, sum(p.numel() for p in parameters))

        def fill() -> None:
            found = rows_of_all()
            for rank in range(self.num_ranks):
                rows = [p.data.split(self._rows[p])[rank] for p in parameters]
                count = sum(r.numel() for r in rows)
                told, found = found[:count], found[count:]
                for mine, piece in zip(rows, _cut(told, [r.shape for r in rows]), strict=True):
                    mine.copy_(piece.view(mine.shape))

        return fill

    def _start_gather(self, flat: Tensor, total: int) -> Callable[[], Tensor]:
        """Start the gathering of numbers, `total` of all ranks; return what waits for it."""
        if not self._is_alone:
            return all_gather(flat, group=self._gather_group, async_op=True).wait
        # Nobody is there to say how many it has. What is sent is kept as long as by a handle.
        kept = (flat, flat.new_empty(total))
        return lambda: kept[1]


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    return list(flat.split([shape.numel() for shape in shapes])) if shapes else []

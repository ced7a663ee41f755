"""Expert tensor parallelism: ranks that hold slices of the same experts share their rows.

Each rank of the group brings the rows that its own dispatch gave it, for the same local experts.
All of them pass the slice of every rank, and the partial results are summed where the row came
from. Ranks may bring any number of rows, also none.

Invariant: a rank gets its results in the order of its rows, and with the sum over slices they are
those of one rank with whole experts.

    layout = share_counts(num_tokens_per_expert, group=etp_group)
    x_SD, weights_S = gather_rows(x_RD, weights_R, layout)
    partial_SD = experts(x_SD, layout.num_tokens_per_expert, weights_S)
    y_RD = return_rows(partial_SD, layout)

Dims: R rows of this rank, S rows of the group, W its ranks, E local experts, D width of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives import all_gather, reduce_scatter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedLayout:
    """Whose rows lie where, after the rows of all ranks are sorted by expert. Holds no gradient."""

    rows_of_rank: tuple[int, ...]  # rows that each rank of the group brings; their sum is S
    # rows of each local expert over the group; their sum is S
    num_tokens_per_expert: tuple[int, ...]
    to_experts_S: Tensor  # int64 [S], where each sorted row stands among the rows by rank
    to_ranks_S: Tensor  # the inverse permutation
    group: ProcessGroup  # the ranks
    timeout_s: float | None  # limit for each exchange


def share_counts(
    num_tokens_per_expert: Sequence[int],
    *,
    group: ProcessGroup,
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
) -> SharedLayout:
    """Tell the group how many rows this rank has for each expert. Collective, of integers only.

    The number of experts is the same on every rank; `device` is that of the rows, and `timeout_s`
    limits this exchange and those of the rows.
    """
    own_1E = torch.tensor([list(num_tokens_per_expert)], dtype=torch.int64)
    own_1E = own_1E.to(device) if device is not None else own_1E
    counts_WE = all_gather(own_1E, group=group, timeout_s=timeout_s).cpu()
    order_S = rows_by_expert(counts_WE)
    return SharedLayout(
        rows_of_rank=tuple(counts_WE.sum(dim=1).tolist()),
        num_tokens_per_expert=tuple(counts_WE.sum(dim=0).tolist()),
        to_experts_S=order_S.to(own_1E.device),
        to_ranks_S=torch.argsort(order_S).to(own_1E.device),
        group=group,
        timeout_s=timeout_s,
    )


def rows_by_expert(counts_WE: Tensor) -> Tensor:
    """[S], where rows sorted by expert, then rank, stand among rows sorted by rank, then expert."""
    num_ranks, num_experts = counts_WE.shape
    expert_WE = torch.arange(num_experts, device=counts_WE.device).expand(num_ranks, num_experts)
    expert_S = torch.repeat_interleave(expert_WE.reshape(-1), counts_WE.reshape(-1))
    return torch.sort(expert_S, stable=True).indices


def gather_rows(x_RD: Tensor, weights_R: Tensor, layout: SharedLayout) -> tuple[Tensor, Tensor]:
    """The rows [S, D] of all ranks and their weights [S], sorted by expert, then rank.

    Collective over the layout's group, and so is the backward, which sums over the ranks.
    """
    x_SD = all_gather(x_RD, group=layout.group, timeout_s=layout.timeout_s)
    weights_S = all_gather(weights_R, group=layout.group, timeout_s=layout.timeout_s)
    to, back = layout.to_experts_S, layout.to_ranks_S
    return _Permutation.apply(x_SD, to, back), _Permutation.apply(weights_S, to, back)


def return_rows(partial_SD: Tensor, layout: SharedLayout) -> Tensor:
    """Sum the slices' results [S, D] over the ranks; return those of this rank's rows, [R, D].

    Collective over the layout's group, and so is the backward.
    """
    by_rank_SD = _Permutation.apply(partial_SD, layout.to_ranks_S, layout.to_experts_S)
    return reduce_scatter(
        by_rank_SD, splits=layout.rows_of_rank, group=layout.group, timeout_s=layout.timeout_s
    )


@final
class _Permutation(torch.autograd.Function):
    """`x[order]`, whose gradient is `grad[inverse]`: autograd itself would add into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Permutation.apply(grad, inverse, order), None, None

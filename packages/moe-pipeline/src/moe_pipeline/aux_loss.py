"""The load-balancing loss, the same number in every layout.

The loss of a layer is `coef * E * sum_e f_e * P_e` with `f_e` the fraction of routed rows that went
to expert e and `P_e` the mean probability of expert e (Switch Transformer, arXiv 2101.03961, eq. 4;
GShard). `f` sums to 1 and is not differentiated. transformers' `load_balancing_loss_func` counts
rows per token instead of per routed row, so it is k times this one.

Scopes:

- `micro_batch`: f and P over all tokens of the global micro-batch, wherever they are.
- `sequence`: f and P within each sequence, averaged over the sequences of the global micro-batch
  (DeepSeek-V3, arXiv 2412.19437, eq. 17-20). A sequence must lie on one rank entirely.

Each rank computes its *share*: the shares of all ranks that hold tokens of the micro-batch sum to
the loss, and so do their gradients. So a trainer adds shares; it never scales them by a number of
ranks. Only integers are reduced (row counts, tokens or sequences), in forward; nothing in backward.

Dims: T tokens of this rank, E experts, B sequences, S tokens of a sequence, K choices per token.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives import all_reduce
from moe_pipeline.config import MoEConfig
from moe_pipeline.router import Routed


def balancing_loss(
    routed: Routed,
    config: MoEConfig,
    *,
    sequence_shape: tuple[int, int] | None,
    token_group: ProcessGroup | None = None,
    timeout_s: float | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's share of the loss, and the global routed-row counts.

    Collective over `token_group` (one all-reduce of E + 1 integers), on every rank whatever its
    number of tokens; no communication without a group.

    Args:
        routed: the router's result for this rank's tokens.
        config: coefficient and scope.
        sequence_shape: (B, S) of this rank's tokens, or None when they have no sequence structure.
        token_group: the ranks that hold parts of this micro-batch.
        timeout_s: limit for the all-reduce.

    Returns:
        The share, a 0-d tensor in the dtype of the probabilities, and `load_E`, int64 [E].

    Raises:
        ValueError: scope "sequence" without `sequence_shape`.
    """
    counts_E, probs_TE = routed.plan.counts_E, routed.probs_TE
    by_sequence = config.moe_aux_loss_scope == "sequence"
    if by_sequence and sequence_shape is None:
        raise ValueError(
            "moe_aux_loss_scope='sequence' needs to know the sequences: "
            "pass the layer [batch, sequence, hidden] instead of [tokens, hidden]"
        )
    own_parts = sequence_shape[0] if by_sequence and sequence_shape else probs_TE.shape[0]
    totals = torch.cat([counts_E, counts_E.new_tensor([own_parts])])
    if token_group is not None:
        totals = all_reduce(totals, group=token_group, timeout_s=timeout_s)
    load_E, parts = totals[:-1], totals[-1]
    if by_sequence and sequence_shape is not None:
        share = _sequence_sum(routed, sequence_shape)
    else:
        f_E = load_E.to(probs_TE.dtype) / load_E.sum().clamp(min=1)
        share = torch.dot(f_E, probs_TE.sum(dim=0))
    scale = config.router_aux_loss_coef * config.num_experts
    return share * (scale / parts.clamp(min=1).to(probs_TE.dtype)), load_E


def _sequence_sum(routed: Routed, sequence_shape: tuple[int, int]) -> Tensor:
    """Sum over this rank's sequences of `sum_e f_e * P_e`; 0 when there is no token."""
    num_sequences, length = sequence_shape
    probs_TE = routed.probs_TE
    if probs_TE.shape[0] == 0:
        return probs_TE.sum()
    num_experts = probs_TE.shape[1]
    idx_BR = routed.plan.topk_idx_TK.reshape(num_sequences, -1)
    f_BE = probs_TE.new_zeros(num_sequences, num_experts)
    f_BE.scatter_add_(1, idx_BR, probs_TE.new_ones(()).expand(idx_BR.shape))
    f_BE /= idx_BR.shape[1]
    p_BE = probs_TE.reshape(num_sequences, length, num_experts).mean(dim=1)
    return (f_BE * p_BE).sum()

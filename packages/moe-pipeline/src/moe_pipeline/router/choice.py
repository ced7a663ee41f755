"""Which experts score best, exactly: the same choice on every device and in every layout.

**Ties.** Among equal scores the lower index comes first, among experts, among groups of experts and
among tokens. `torch.topk` promises no order among ties, so fp32 scores are turned into 64-bit keys
that are all different: the bits of the score, changed so that their order as integers is the order
of the numbers, followed by the reversed index.

    idx_TK = choose_experts(scores_TE, config)

Dims: T tokens, E experts, K choices per token, G groups of experts; N rows, M columns of anything.
"""

import torch
from torch import Tensor

from moe_pipeline.config import MoEConfig, RouterOptions


def choose_experts(scores_TE: Tensor, config: MoEConfig) -> Tensor:
    """Return int64 [T, K]: each token's best experts, best first.

    With `n_group` above 1 only those of the token's `topk_group` best groups. A group's score is
    its best expert's (DeepSeek-V2, arXiv 2405.04434) or the sum of its two best (DeepSeek-V3, arXiv
    2412.19437), as `moe_router_group_score` says. Scores are finite, of any sign, bias included.
    """
    if config.router.n_group > 1:
        scores_TE = _in_best_groups(scores_TE, config.router)
    return topk_lowest_index_first(scores_TE, config.num_experts_per_tok)


def topk_lowest_index_first(scores_NM: Tensor, k: int) -> Tensor:
    """Return int64 [N, k]: where the k largest of each row are, best first; ties by lower index.

    -0 equals 0.
    """
    if scores_NM.dtype != torch.float32:
        order_NM = torch.sort(scores_NM, dim=1, descending=True, stable=True).indices
        return order_NM[:, :k].contiguous()
    # Adding 0 makes 0 of -0, whose bits differ.
    bits_NM = (scores_NM + 0.0).contiguous().view(torch.int32)
    # Of a negative number the larger bits mean the smaller number: all but the sign are flipped.
    ordered_NM = bits_NM ^ ((bits_NM >> 31) & 0x7FFFFFFF)
    num_columns = scores_NM.shape[1]
    reversed_M = torch.arange(num_columns - 1, -1, -1, device=scores_NM.device)
    keys_NM = (ordered_NM.to(torch.int64) << 32) | reversed_M
    return keys_NM.topk(k, dim=1).indices


def _in_best_groups(scores_TE: Tensor, options: RouterOptions) -> Tensor:
    """Scores, with -inf outside of each token's best groups."""
    num_tokens, num_experts = scores_TE.shape
    per_group = num_experts // options.n_group
    by_group = scores_TE.reshape(num_tokens, options.n_group, per_group)
    if options.moe_router_group_score == "max":
        groups_TG = by_group.amax(dim=2)
    else:
        groups_TG = by_group.topk(2, dim=2).values.sum(dim=2)
    chosen = topk_lowest_index_first(groups_TG, options.topk_group)
    allowed_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, chosen, True)
    allowed_TE = allowed_TG.repeat_interleave(per_group, dim=1)
    return scores_TE.masked_fill(~allowed_TE, float("-inf"))

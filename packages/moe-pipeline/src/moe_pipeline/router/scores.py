"""From logits to scores to weights, for every scoring rule of the room `scoring`.

A weight depends on the logits and on the choice, never on how the choice was made: whoever holds a
plan computes its weights without choosing again. A choice of -1 (dropped, or none) has weight 0 and
takes no part in what weights are normalised by.

    scores_TE, probs_TE = expert_scores(logits_TE, options)
    weights_TK = chosen_weights(logits_TE, scores_TE, topk_idx_TK, options)

Dims: T tokens, E experts, K choices per token.
"""

import torch
from torch import Tensor

from moe_pipeline.config import RouterOptions
from moe_pipeline.scoring import SCORE_FUNCTIONS


def expert_scores(logits_TE: Tensor, options: RouterOptions) -> tuple[Tensor, Tensor]:
    """Scores and probabilities of the experts by the rule of `options`; [T, E], differentiable."""
    function = SCORE_FUNCTIONS[options.moe_router_score_function]
    scores_TE = function.scores(logits_TE)
    return scores_TE, function.probs(logits_TE, scores_TE)


def chosen_weights(
    logits_TE: Tensor, scores_TE: Tensor, topk_idx_TK: Tensor, options: RouterOptions
) -> Tensor:
    """Return [T, K], differentiable: the weights of the chosen experts.

    The scores of the chosen, or with `moe_router_pre_softmax=False` a softmax over their logits;
    divided by their sum with `norm_topk_prob`; times `routed_scaling_factor`. A token may have no
    expert at all.
    """
    absent_TK = topk_idx_TK < 0
    idx_TK = topk_idx_TK.clamp(min=0)
    if options.moe_router_pre_softmax:
        weights_TK = scores_TE.gather(1, idx_TK)
    else:
        # The lowest finite number, since a row of -inf alone would give NaN.
        lowest = torch.finfo(logits_TE.dtype).min
        chosen_TK = logits_TE.gather(1, idx_TK).masked_fill(absent_TK, lowest)
        weights_TK = torch.softmax(chosen_TK, dim=-1)
    weights_TK = weights_TK.masked_fill(absent_TK, 0.0)
    if options.norm_topk_prob:
        total_T1 = weights_TK.sum(dim=1, keepdim=True)
        # moe_norm_min may be 0, and a token's chosen scores too.
        floor = max(options.moe_norm_min, torch.finfo(total_T1.dtype).tiny)
        weights_TK = weights_TK / total_T1.clamp(min=floor)
    if options.routed_scaling_factor != 1.0:
        weights_TK = weights_TK * options.routed_scaling_factor
    return weights_TK

"""Sinkhorn routing: experts' offsets that even out their load before tokens choose.

exp(logits) is scaled by one factor per token and one per expert until each token has mass 1 and
each expert G / E: the entropy-regularised optimal transport of Sinkhorn and Knopp, used for routing
in S-BASE (Clark et al., arXiv 2202.01169). Tokens choose by the scaled matrix. A token's factor
does not change the order of its experts, so what remains of it is one offset per expert:

    offset_E = sinkhorn_offsets(logits_TE, groups=groups)
    topk_idx_TK = choose_experts(logits_TE + offset_E, config)

Only the choice is balanced; weights are those of the plain scores.

Dims: T tokens of this rank, G of the global microbatch, E experts.
"""

import math

import torch
from torch import Tensor

from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.global_tokens import gather_tokens

# The largest relative error of an expert's mass, and when to stop trying.
_TOLERANCE = 1e-4
_MAX_ITERATIONS = 200


def sinkhorn_offsets(
    logits_TE: Tensor, *, groups: MoEGroups, token_ids_T: Tensor | None = None
) -> Tensor:
    """Return [E], logarithms of the experts' factors, no gradient; 0 if there is no token.

    Iterates until every expert's mass is within 1e-4 of G / E, at most 200 times, in logarithms, so
    that no logit is too large. Every rank iterates over all tokens, so that the ranks' choices rest
    on the same numbers. Collective over `groups.tokens`, on every rank whatever its number of
    tokens.
    """
    everyone = gather_tokens([logits_TE.detach()], groups, token_ids_T)
    logits_GE = everyone.rows[0]
    num_tokens, num_experts = logits_GE.shape
    offset_E = logits_GE.new_zeros(num_experts)
    if num_tokens == 0:
        return offset_E
    wanted = math.log(num_tokens / num_experts)
    for _ in range(_MAX_ITERATIONS):
        scaled_GE = torch.log_softmax(logits_GE + offset_E, dim=1)
        missing_E = wanted - torch.logsumexp(scaled_GE, dim=0)
        offset_E = offset_E + missing_E
        if missing_E.abs().max().item() <= _TOLERANCE:
            break
    return offset_E

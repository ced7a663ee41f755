"""Expert choice: experts take the tokens that fit them best, equally many each.

Each expert takes the `expert_capacity` tokens of the global microbatch that score highest for it
(Zhou et al., arXiv 2202.09368). The load is balanced by construction; a token may get any number of
experts, also none. What a token gets depends on tokens after it, so a causal model that generates
token by token cannot do what it was trained to.

    topk_idx_TE = choose_tokens(scores_TE, config, groups=groups)

Dims: T tokens of this rank, G of the global microbatch, E experts, C tokens that an expert takes.
"""

import torch
from torch import Tensor

from moe_pipeline.config import MoEConfig
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.capacity import expert_capacity
from moe_pipeline.router.choice import topk_lowest_index_first
from moe_pipeline.router.global_tokens import gather_tokens


def choose_tokens(
    scores_TE: Tensor,
    config: MoEConfig,
    *,
    groups: MoEGroups,
    token_ids_T: Tensor | None = None,
) -> Tensor:
    """Return int64 [T, E]: the experts that take each token, best first, then -1.

    As wide as there are experts, whatever was chosen, so that it has the same shape on every rank
    and in every step. Ties go to the first token, in the order of `gather_tokens`. Collective over
    `groups.tokens`, on every rank whatever its number of tokens.
    """
    everyone = gather_tokens([scores_TE.detach()], groups, token_ids_T)
    scores_EG = everyone.rows[0].t()
    num_experts, num_tokens = scores_EG.shape
    capacity = min(expert_capacity(num_tokens, config), num_tokens)
    taken_EC = topk_lowest_index_first(scores_EG, capacity)
    taken_EG = torch.zeros_like(scores_EG, dtype=torch.bool).scatter_(1, taken_EC, True)
    taken_TE = taken_EG.t()[everyone.own_T]
    own_scores_TE = scores_TE.detach().masked_fill(~taken_TE, float("-inf"))
    best_first_TE = topk_lowest_index_first(own_scores_TE, num_experts)
    return torch.where(taken_TE.gather(1, best_first_TE), best_first_TE, -1)

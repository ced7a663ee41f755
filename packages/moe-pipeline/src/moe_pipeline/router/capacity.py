"""Capacity: the most tokens that an expert takes, and who has to go when more come.

An expert takes `ceil(factor * T * k / E)` of the T tokens of the global microbatch (Switch
Transformer, arXiv 2101.03961; GShard, arXiv 2006.16668), counted over all ranks that share it, so
that the same rows are dropped in every layout. A dropped row has the expert -1: nothing is
dispatched for it, its weight is 0, and the token's other experts are weighted as if they were all
that it chose.

    topk_idx_TK = drop_over_capacity(topk_idx_TK, probs_TE, config, groups=groups)

Dims: T tokens of this rank, G of the global microbatch, E experts, K choices per token, R = G * K.
"""

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor

from moe_pipeline.config import MoEConfig
from moe_pipeline.groups import MoEGroups
from moe_pipeline.router.global_tokens import gather_tokens


def expert_capacity(num_tokens: int, config: MoEConfig) -> int:
    """Return `ceil(factor * num_tokens * k / E)`, of global tokens; a factor of None is 1."""
    factor = config.router.moe_expert_capacity_factor
    share = Fraction(num_tokens * config.num_experts_per_tok, config.num_experts)
    return ceil(Fraction(repr(1.0 if factor is None else float(factor))) * share)


def drop_over_capacity(
    topk_idx_TK: Tensor,
    probs_TE: Tensor,
    config: MoEConfig,
    *,
    groups: MoEGroups,
    token_ids_T: Tensor | None = None,
) -> Tensor:
    """Return the choices with -1 where an expert has no room.

    Under `moe_token_drop_policy="probs"` an expert keeps the tokens that give it the highest
    probability, and of equal ones the first; under "position" the first tokens. The order of tokens
    is that of `gather_tokens`. A token has an expert at most once. Collective over `groups.tokens`,
    on every rank whatever its number of tokens.
    """
    rows = [topk_idx_TK]
    if config.router.moe_token_drop_policy == "probs":
        rows.append(probs_TE.detach().gather(1, topk_idx_TK.clamp(min=0)))
    everyone = gather_tokens(rows, groups, token_ids_T)
    idx_GK = everyone.rows[0]
    place_GK = _places(idx_GK, everyone.rows[1] if len(rows) > 1 else None)
    kept_TK = place_GK[everyone.own_T] < expert_capacity(len(idx_GK), config)
    return torch.where(kept_TK, topk_idx_TK, -1)


def _places(idx_GK: Tensor, probs_GK: Tensor | None) -> Tensor:
    """Each row's place, from 0, in the queue of its expert: by probability, or by token."""
    idx_R = idx_GK.reshape(-1)
    order_R = torch.arange(len(idx_R), device=idx_R.device)
    if probs_GK is not None:
        order_R = torch.argsort(probs_GK.reshape(-1), descending=True, stable=True)
    order_R = order_R[torch.argsort(idx_R[order_R], stable=True)]
    sorted_R = idx_R[order_R]
    first_R = torch.searchsorted(sorted_R, sorted_R)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=order_R.device) - first_R
    return place_R.reshape(idx_GK.shape)

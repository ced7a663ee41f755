"""The tokens of a global microbatch side by side, for choices that depend on all of them.

Every rank sees the same rows in the same order and makes the same decision, so that nothing more
has to be exchanged and no layout decides otherwise than one process.

    everyone = gather_tokens([scores_TE], groups, token_ids_T)
    (scores_GE,) = everyone.rows
    own_TE = decide(scores_GE)[everyone.own_T]

Dims: T tokens of this rank, G tokens of the global microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives import all_gather
from moe_pipeline.groups import MoEGroups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalTokens:
    """What `gather_tokens` returns."""

    rows: tuple[Tensor, ...]  # the tensors [G, ...] of all tokens, in token order
    own_T: Tensor  # int64 [T], where this rank's tokens stand there


def gather_tokens(
    rows: Sequence[Tensor], groups: MoEGroups, token_ids_T: Tensor | None
) -> GlobalTokens:
    """Bring together the rows of all ranks of `groups.tokens`, in token order.

    Tokens are ordered by `token_ids_T`; without it, and among equal ids, by rank and then by place.
    Not differentiable. Collective over `groups.tokens` (one all-gather for each tensor and one for
    the order), on every rank whatever its number of tokens; without that group no communication.

    `token_ids_T`: each token's number in the global microbatch; on every rank or on none.
    """
    num_tokens = rows[0].shape[0]
    group, own_rank = groups.tokens, 0
    num_columns = 1 if token_ids_T is None else 2
    place_TC = torch.zeros(num_tokens, num_columns, dtype=torch.int64, device=rows[0].device)
    if token_ids_T is not None:
        place_TC[:, 1] = token_ids_T
    with torch.no_grad():
        if group is not None:
            own_rank = dist.get_rank(group)
            place_TC[:, 0] = own_rank
            place_TC = all_gather(place_TC, group=group, timeout_s=groups.timeout_s)
            rows = [all_gather(each, group=group, timeout_s=groups.timeout_s) for each in rows]
        # The id, or without one the rank; then the place.
        rank_G, order_by_G = place_TC[:, 0], place_TC[:, -1]
        order_G = torch.argsort(order_by_G, stable=True)
        position_G = torch.empty_like(order_G)
        position_G[order_G] = torch.arange(len(order_G), device=order_G.device)
        return GlobalTokens(
            rows=tuple(each[order_G] for each in rows),
            # Where no other rank exists, all of them say that they are this one.
            own_T=position_G[rank_G == own_rank][:num_tokens],
        )

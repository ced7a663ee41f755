"""Routed rows in the order in which experts take them.

    order = ExpertOrder.of(topk_idx_TK, num_experts=8)
    x_RD = x_TD[order.choice_R // topk_idx_TK.shape[1]]

Dims: T tokens, K choices, R choices of an expert, sorted by expert and among them by token.
"""

from itertools import pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from moe_pipeline.errors import MoEValueError


@final
class ExpertOrder(NamedTuple):
    """Which choice each row is."""

    # int64 [R], index of the choice in the flattened [T, K]; token t is `choice // K`
    choice_R: Tensor
    num_tokens_per_expert: tuple[int, ...]  # rows of each expert

    @classmethod
    def of(cls, topk_idx_TK: Tensor, *, num_experts: int) -> "ExpertOrder":
        """Sort choices, int64 [T, K], -1 for none. On CUDA it waits for the counts, once."""
        expert_R, order = torch.sort(topk_idx_TK.reshape(-1), stable=True)
        edges = torch.arange(-1, num_experts + 1, device=order.device)
        # Where the rows of -1, of each expert, and of what no expert has, begin.
        begin, *begins = torch.searchsorted(expert_R, edges).tolist()
        if begin > 0 or begins[-1] < len(order):
            wrong = int(expert_R[0] if begin else expert_R[-1])
            raise MoEValueError(
                f"topk_idx names expert {wrong}, but there are {num_experts} experts; "
                f"use 0..{num_experts - 1}, or -1 for none"
            )
        return cls(order[begins[0] :], tuple(b - a for a, b in pairwise(begins)))

"""Routed rows in the order in which experts take them.

    order = ExpertOrder.of(topk_idx_TK, num_experts=8)
    x_RD = x_TD[order.choice_R // topk_idx_TK.shape[1]]

Dims: T tokens, K choices, R choices of an expert, sorted by expert and among them by token.
"""

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
        """Sort choices, int64 [T, K], -1 for none. On CUDA it waits for the counts."""
        flat = topk_idx_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        # The first count is of all numbers below -1.
        below, none, *counts = torch.bincount(
            flat.clamp(min=-2) + 2, minlength=num_experts + 2
        ).tolist()
        if below or len(counts) > num_experts:
            wrong = int(flat.min()) if below else len(counts) - 1
            raise MoEValueError(
                f"topk_idx names expert {wrong}, but there are {num_experts} experts; "
                f"use 0..{num_experts - 1}, or -1 for none"
            )
        return cls(order[none:], tuple(counts))

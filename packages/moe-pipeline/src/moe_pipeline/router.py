"""Which experts each token goes to, and with what weight.

The choice is an immutable `RoutingPlan`; the weights are differentiable and come from gathering the
probabilities at the plan's indices, so that whoever holds a plan can compute the weights again
without choosing again. Scores are computed in fp32 whatever the dtype of the model (fp64 stays
fp64), because in bf16 near-ties would decide the routing.

**Ties.** Among equal probabilities the expert with the lower index wins, on every device and in
every layout. `torch.topk` promises no order among ties, so the choice is made on 64-bit keys that
are all different: the bits of the non-negative fp32 probability, whose order as integers is their
order as numbers, followed by the reversed expert index.

    router = TopKRouter(config)
    routed = router(x_TD)
    routed.plan.topk_idx_TK, routed.topk_weights_TK

Dims: T tokens of this rank, D hidden, E experts of the layer, K choices per token.
"""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.config import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingPlan:
    """Who goes where: made once for a layer and micro-batch, and never changed.

    Attributes:
        topk_idx_TK: int64 [T, K], chosen experts, most probable first.
        counts_E: int64 [E], routed rows per expert, of this rank's tokens.
        num_experts: E.
    """

    topk_idx_TK: Tensor
    counts_E: Tensor
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """What a router returns.

    Attributes:
        plan: the choice; holds no gradient.
        topk_weights_TK: weights of the chosen experts, differentiable, in the dtype of the scores
            (fp32, or fp64 for an fp64 model).
        probs_TE: probabilities over all experts, differentiable, same dtype.
    """

    plan: RoutingPlan
    topk_weights_TK: Tensor
    probs_TE: Tensor


@final
class TopKRouter(nn.Module):
    """Softmax over all experts, then the k most probable (Qwen3-MoE, Mixtral).

    Parameter `weight` [E, D] has the name and layout of transformers' `Qwen3MoeTopKRouter`.
    Not collective.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        shape = (config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with `initializer_range`."""
        nn.init.normal_(self.weight, std=self.config.initializer_range)

    def forward(self, x_TD: Tensor) -> Routed:
        """Route [T, D] tokens; T may be 0.

        Raises:
            ValueError: `x_TD` is not [T, hidden_size].
        """
        if x_TD.dim() != 2 or x_TD.shape[1] != self.config.hidden_size:
            raise ValueError(
                f"the router expects [tokens, hidden_size={self.config.hidden_size}], "
                f"got shape {tuple(x_TD.shape)}"
            )
        probs_TE = self._probabilities(x_TD)
        plan = self._choose(probs_TE.detach())
        weights_TK = probs_TE.gather(1, plan.topk_idx_TK)
        if self.config.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        return Routed(plan=plan, topk_weights_TK=weights_TK, probs_TE=probs_TE)

    def _probabilities(self, x_TD: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x_TD.dtype, self.weight.dtype), torch.float)
        # Autocast would silently take the product in bf16.
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
            return torch.softmax(logits_TE, dim=-1)

    def _choose(self, probs_TE: Tensor) -> RoutingPlan:
        num_experts = self.config.num_experts
        topk_idx_TK = topk_lowest_index_first(probs_TE, self.config.num_experts_per_tok)
        counts_E = torch.bincount(topk_idx_TK.reshape(-1), minlength=num_experts)
        return RoutingPlan(topk_idx_TK=topk_idx_TK, counts_E=counts_E, num_experts=num_experts)


def topk_lowest_index_first(probs_TE: Tensor, k: int) -> Tensor:
    """Indices [T, k] of the k largest of each row; among equals the lower index comes first.

    Args:
        probs_TE: fp32 or fp64, no negative values.
        k: at most E.
    """
    if probs_TE.dtype != torch.float32:
        order_TE = torch.sort(probs_TE, dim=1, descending=True, stable=True).indices
        return order_TE[:, :k].contiguous()
    num_experts = probs_TE.shape[1]
    reversed_E = torch.arange(num_experts - 1, -1, -1, device=probs_TE.device)
    keys_TE = (probs_TE.contiguous().view(torch.int32).to(torch.int64) << 32) | reversed_E
    return keys_TE.topk(k, dim=1).indices

"""All of a layer's experts on one rank, over tokens instead of routed rows.

The same numbers as `comm_collectives.dispatch`, `experts_function` and `combine` without a group,
and less memory: `fused` saves the tokens and gathers their rows when it needs them, instead of
saving k rows for each token.

    out_TD = token_experts_function(x_TD, topk_idx_TK, topk_weights_TK, weights, options)

Dims: T tokens, K choices, R routed rows sorted by expert, D width of a row, E experts.
"""

import torch
from torch import Tensor

from comm_collectives import combine, dispatch
from moe_pipeline.config import ExpertsOptions
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.experts.activations import Activation
from moe_pipeline.experts.compute import check_rows, choose_implementation, experts_function
from moe_pipeline.experts.fused import fused_token_experts
from moe_pipeline.experts.order import ExpertOrder
from moe_pipeline.experts.weights import ExpertWeights


def token_experts_function(
    x_TD: Tensor,
    topk_idx_TK: Tensor,
    topk_weights_TK: Tensor,
    weights: ExpertWeights,
    options: ExpertsOptions,
) -> Tensor:
    """Send each token through its experts and sum what they return: [T, D]. Not collective.

    Args:
        x_TD: [T, D] in the dtype of the weights.
        topk_idx_TK: int64 [T, K] in 0..E-1, or -1 for none.
        topk_weights_TK: [T, K] router weights, any float dtype.
        weights: of all E experts.
        options: activation and implementation.
    """
    num_experts = weights.down_EDH.shape[0]
    _check_choices(x_TD, topk_idx_TK, topk_weights_TK)
    if choose_implementation(weights, options) != "fused":
        there = dispatch(x_TD, topk_idx_TK, topk_weights_TK, num_experts=num_experts)
        counts = there.num_tokens_per_expert
        y_RD = experts_function(there.x, there.topk_weights, weights, counts, options)
        return combine(y_RD, there.handle)
    check_rows(x_TD, weights)
    order = ExpertOrder.of(topk_idx_TK, num_experts=num_experts)
    activation = Activation.of(options, interleaved=weights.interleaved)
    return fused_token_experts(x_TD, topk_weights_TK, weights, order, activation)


def _check_choices(x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor) -> None:
    shape = topk_idx_TK.shape
    if len(shape) != 2 or shape != topk_weights_TK.shape or shape[:1] != x_TD.shape[:1]:
        raise MoEValueError(
            f"topk_idx {tuple(shape)} and topk_weights {tuple(topk_weights_TK.shape)} "
            f"must both be [{x_TD.shape[0]}, choices], one line for each row of x_TD"
        )
    if topk_idx_TK.dtype != torch.int64:
        raise MoETypeError(f"topk_idx is {topk_idx_TK.dtype}; convert it to torch.int64")

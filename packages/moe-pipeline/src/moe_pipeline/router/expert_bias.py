"""Balancing without a loss: a bias per expert that follows its load.

After each optimizer step the bias of an expert that got more rows than the mean goes down by
`moe_router_bias_update_rate`, that of one that got fewer goes up (Wang et al., arXiv 2408.15664;
DeepSeek-V3, arXiv 2412.19437). The bias takes part in the choice and never in the weights.

    optimizer.step()
    update_expert_bias(m for m in model.modules() if isinstance(m, TopKRouter))

The loads that a router has counted are those of the global microbatches, the same on every rank,
so every rank makes the same update and nothing is exchanged.

Dims: E experts.
"""

from collections.abc import Iterable

import torch

from moe_pipeline._checks import check_type
from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.router.top_k import TopKRouter


@torch.no_grad()
def update_expert_bias(routers: Iterable[TopKRouter]) -> None:
    """Move each router's bias by `rate * sign(mean(load) - load)`; then its counts start again.

    The comparison is between integers, hence exact. Not collective, but to be called on every rank.
    A router that counted no row keeps its bias.

    Raises:
        ValueError: a router has no bias; nothing is updated.
        TypeError: a bias in less than fp32, which would swallow the steps; nothing is updated.
    """
    check_type("routers", routers, Iterable)
    checked = list(routers)
    for router in checked:
        _check_router(router)
    for router in checked:
        load_E = router.tokens_per_expert
        direction_E = torch.sign(load_E.sum() - load_E * load_E.shape[0])
        rate = router.config.router.moe_router_bias_update_rate
        router.e_score_correction_bias.add_(direction_E, alpha=rate)
        load_E.zero_()


def _check_router(router: TopKRouter) -> None:
    check_type("a router", router, TopKRouter)
    if not router.config.router.moe_router_enable_expert_bias:
        raise MoEValueError(
            "update_expert_bias got a router without one; leave it out, or build its layer with "
            "moe_router_enable_expert_bias=True"
        )
    dtype = router.e_score_correction_bias.dtype
    if dtype not in (torch.float32, torch.float64):
        raise MoETypeError(
            f"e_score_correction_bias is {dtype}, too coarse for its steps; build the layer with "
            f"dtype={dtype} instead of converting it, which keeps the bias in torch.float32"
        )

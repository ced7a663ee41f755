"""Projections of Latent MoE: experts work on narrower rows than the model.

The router and the shared expert see the token itself; what is dispatched, and with it the bytes on
the wire and the experts' weights, shrinks by `hidden_size / moe_latent_size`:

    out = fc2_latent_proj(combine(experts(dispatch(fc1_latent_proj(x))))) + shared_experts(x)

The projections are linear and without bias, so both commute with the sum over a token's experts.
Names and order are those of transformers' Nemotron-H block.

    fc1_latent_proj, fc2_latent_proj = latent_projections(config)
"""

import torch
from torch import nn

from moe_pipeline.config import MoEConfig
from moe_pipeline.errors import MoEValueError


def latent_projections(
    config: MoEConfig,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Linear, nn.Linear]:
    """Into the latent width, weight [latent, d], and out of it, [d, latent].

    Weights are drawn from a normal distribution with `initializer_range`.
    """
    if config.moe_latent_size is None:
        raise MoEValueError(
            "latent projections need MoEConfig(moe_latent_size=...), and it is None"
        )
    d, latent = config.hidden_size, config.moe_latent_size
    into = nn.Linear(d, latent, bias=False, device=device, dtype=dtype)
    out = nn.Linear(latent, d, bias=False, device=device, dtype=dtype)
    for projection in (into, out):
        nn.init.normal_(projection.weight, std=config.initializer_range)
    return into, out

"""One decoder layer: attention and an MLP, dense or of experts, each behind a norm and a residual.

Which attention, which window and whether there are experts is read from the `DecoderConfig`;
nothing here asks for the family.

    layer = DecoderLayer(config, 3, LayerOptions())
    x_BSd, routed = layer(x_BSd, context, None)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_pipeline import MoEConfig, MoEGroups, MoELayer
from moe_pipeline.layer import DispatchOptions, MoEOutput
from moe_pipeline.ops import counter_key
from moe_pipeline.recomputation import discarded
from moe_train.model.config import DecoderConfig
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import Attention, AttentionContext, DenseMLP
from moe_train.model.mla import LatentAttention, MLAOptions
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import WHOLE, PositionCut
from moe_train.model.token_numbers import ROUTER

_TOGETHER = DispatchOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """With whom a layer shares tokens and experts, and how it computes.

    Args:
        ep_group: ranks that share the experts; None when this rank holds all of them.
        expert_parts: experts of each rank of it, for layers that do not have equal parts.
        token_group: ranks that hold other tokens of the same microbatch (auxiliary loss).
        cut, cp_group: which positions of each sample this rank has, and of these ranks those that
            have the others; None: it has whole samples.
        cp_attention: how attention sees all of them.
        aux_loss_coef, aux_loss_scope: of the load-balancing loss.
        z_loss_coef: of the router's z-loss.
        capacity_factor, drop_policy: how many tokens an expert takes (None: all), and which.
        bias_update_rate: how far an expert bias moves in a step, where the family has one.
        dispatch: how tokens travel to the experts.
        experts_implementation, experts_fp8: of `moe_pipeline.ExpertsOptions`.
        seed: of dropout and of the router's jitter.
        device, dtype: of the parameters.
    """

    ep_group: dist.ProcessGroup | None = None
    expert_parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    token_group: dist.ProcessGroup | None = None
    cut: PositionCut = WHOLE
    cp_group: dist.ProcessGroup | None = None
    cp_attention: Literal["all_to_all", "ring"] = "all_to_all"
    aux_loss_coef: float = 0.0
    aux_loss_scope: str = "microbatch"
    z_loss_coef: float = 0.0
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    bias_update_rate: float = 0.001
    dispatch: DispatchOptions = _TOGETHER
    experts_implementation: str = "auto"
    experts_fp8: bool = False
    seed: int = 0
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32


class DecoderLayer(nn.Module):
    """Attention and MLP (dense or experts), each behind a norm and a residual.

    Args:
        config: of the decoder.
        layer: global number of the layer.
        options: see `LayerOptions`.
    """

    def __init__(self, config: DecoderConfig, layer: int, options: LayerOptions) -> None:
        super().__init__()
        device, dtype = options.device, options.dtype
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _attention(config, layer, options)
        self.mlp: MoELayer | DenseMLP
        if config.is_sparse(layer):
            groups = MoEGroups(
                ep=options.ep_group,
                ep_parts=options.expert_parts.get(layer),
                tokens=options.token_group,
                sequence=options.cp_group,
            )
            moe = moe_config(config, options)
            noise_key = counter_key(options.seed, layer, ROUTER)
            self.mlp = MoELayer(
                moe,
                groups=groups,
                device=device,
                dtype=dtype,
                noise_key=noise_key,
                dispatch=options.dispatch,
            )
        else:
            self.mlp = DenseMLP(size, config.intermediate_size, device, dtype)
        self.input_layernorm = RMSNorm(size, eps, device, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, device, dtype)

    def forward(
        self, x_BSd: Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> tuple[Tensor, MoEOutput | None]:
        """Return the new hidden states, and what the experts reported if the layer has any."""
        x_BSd = x_BSd + self.self_attn(discarded(self.input_layernorm, x_BSd), context, cache)
        normed_BSd = discarded(self.post_attention_layernorm, x_BSd)
        if isinstance(self.mlp, DenseMLP):
            return x_BSd + self.mlp(normed_BSd), None
        routed = self.mlp(
            normed_BSd, token_idx_N=context.token_idx_N, token_ids_T=context.token_ids_T
        )
        return x_BSd + routed.hidden, routed


def moe_config(config: DecoderConfig, options: LayerOptions) -> MoEConfig:
    """The experts' configuration of one layer: the model's, with what the job decides."""
    moe = config.moe
    losses = replace(
        moe.losses,
        router_aux_loss_coef=options.aux_loss_coef,
        moe_aux_loss_scope=options.aux_loss_scope,
        router_z_loss_coef=options.z_loss_coef,
    )
    router = replace(
        moe.router,
        moe_expert_capacity_factor=options.capacity_factor,
        moe_token_drop_policy=options.drop_policy,
        moe_router_bias_update_rate=options.bias_update_rate,
    )
    experts = replace(
        moe.experts,
        experts_implementation=options.experts_implementation,
        fp8=options.experts_fp8,
    )
    return replace(moe, router=router, losses=losses, experts=experts)


def _attention(
    config: DecoderConfig, layer: int, options: LayerOptions
) -> Attention | LatentAttention:
    device, dtype = options.device, options.dtype
    if isinstance(config.attention, MLAOptions):
        return LatentAttention(
            config.attention,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            layer=layer,
            device=device,
            dtype=dtype,
        )
    return Attention(
        config.attention, hidden_size=config.hidden_size, layer=layer, device=device, dtype=dtype
    )

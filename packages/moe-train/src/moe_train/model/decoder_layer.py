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
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline import MoEConfig, MoEGroups, MoELayer
from moe_pipeline.layer import DispatchOptions, MoEOutput
from moe_pipeline.ops import counter_key
from moe_pipeline.recomputation import discarded
from moe_train.model.config import DecoderConfig
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import Attention, AttentionContext
from moe_train.model.mla import LatentAttention, MLAOptions
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import ALONE, WHOLE, PositionCut, TensorParallel
from moe_train.model.token_numbers import ROUTER

_TOGETHER = DispatchOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """With whom a layer shares tokens and experts, and how it computes.

    Args:
        ep_group: ranks that share the experts; None when this rank holds all of them.
        etp_group: ranks that share each expert; None when this rank has all of those that it has.
        expert_parts: experts of each rank of ep, for layers that do not have equal parts.
        token_group: ranks that hold other tokens of the same microbatch (auxiliary loss).
        cut: which positions of each sample this rank has.
        sequence_group: ranks that have the others; None: it has whole samples.
        cp_group: of these the ones with which attention exchanges heads, or keys; None: none.
        cp_attention: how attention sees all positions then.
        tp: of them the ones that share heads and the inner widths of dense MLPs and shared experts.
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
    etp_group: dist.ProcessGroup | None = None
    expert_parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    token_group: dist.ProcessGroup | None = None
    cut: PositionCut = WHOLE
    sequence_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    cp_attention: Literal["all_to_all", "ring"] = "all_to_all"
    tp: TensorParallel = ALONE
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


class DenseMLP(nn.Module):
    """SwiGLU MLP of the layers without experts.

    Args:
        hidden_size, intermediate_size: widths outside and inside.
        device, dtype: of the parameters.
        tp: ranks that share the inner width.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        device: torch.device | None,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        self.tp = tp
        outer, inner = hidden_size, len(tp.share(intermediate_size))
        self.gate_proj = nn.Linear(outer, inner, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(outer, inner, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(inner, outer, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`, [B, own positions, d]. Collective over the ranks of `tp`."""
        x = self.tp.gather(x)
        hidden = discarded(_gated_silu, self.gate_proj(x), self.up_proj(x))
        return self.tp.summed(hidden, self.down_proj)


def _gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


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
                etp=options.etp_group,
                ep_parts=options.expert_parts.get(layer),
                tokens=options.token_group,
                sequence=options.sequence_group,
                tp=options.tp.group if config.moe.shared_expert is not None else None,
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
            self.mlp = DenseMLP(size, config.intermediate_size, device, dtype, options.tp)
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
            tp=options.tp,
        )
    return Attention(
        config.attention,
        hidden_size=config.hidden_size,
        layer=layer,
        device=device,
        dtype=dtype,
        tp=options.tp,
    )

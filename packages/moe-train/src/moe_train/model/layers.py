"""Attention, norms and the dense MLP of the decoder, numerically those of transformers' Qwen3-MoE.

Packed sequences: a document starts where its position is 0, and a token attends to its own
document only. The mask is derived from the positions, so that it needs no second tensor on its way
through the pipeline; a batch without inner document starts takes the fast causal path.

Shape legend: B sequences, S positions, H query heads, K key/value heads, D head dim, d hidden size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.model.config import Qwen3MoeConfig
from moe_train.model.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What all layers share for one micro-batch: rotary tables and the attention mask.

    `cos_BSD`, `sin_BSD`: rotary tables in the activations' dtype. `mask_B1SS`: boolean, True where
    attention is allowed, or None for plain causal attention.
    """

    cos_BSD: Tensor
    sin_BSD: Tensor
    mask_B1SS: Tensor | None


def attention_context(
    position_ids_BS: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> AttentionContext:
    """Rotary tables (computed in fp32, as transformers does) and the document mask."""
    device = position_ids_BS.device
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = position_ids_BS[..., None].float() * (1.0 / theta**exponents)
    table = torch.cat((angles, angles), dim=-1)
    return AttentionContext(
        table.cos().to(dtype), table.sin().to(dtype), document_mask(position_ids_BS)
    )


def document_mask(position_ids_BS: Tensor) -> Tensor | None:
    """Causal inside each document; None when no sequence holds an inner document start."""
    starts_BS = position_ids_BS == 0
    if not bool(starts_BS[:, 1:].any()):
        return None
    document_BS = starts_BS.cumsum(dim=1)
    same_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    return same_BSS.tril()[:, None]


class KeyValueCache:
    """Keys and values of the positions seen so far, for generation, per layer."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append this call's keys and values and return all of the layer's."""
        if layer in self._layers:
            old_k, old_v = self._layers[layer]
            k_BKSD = torch.cat((old_k, k_BKSD), dim=2)
            v_BKSD = torch.cat((old_v, v_BKSD), dim=2)
        self._layers[layer] = (k_BKSD, v_BKSD)
        return k_BKSD, v_BKSD


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys and rotary embeddings."""

    def __init__(
        self, config: Qwen3MoeConfig, layer: int, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, queries, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(hidden, keys, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(hidden, keys, bias=bias, device=device, dtype=dtype)
        self.o_proj = nn.Linear(queries, hidden, bias=bias, device=device, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, device, dtype)

    def forward(
        self, x_BSd: Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> Tensor:
        """Attend within each document; with a cache, `x_BSd` continues the cached positions."""
        B, S, _ = x_BSd.shape
        q_BHSD = self.q_norm(self.q_proj(x_BSd).view(B, S, -1, self.head_dim)).transpose(1, 2)
        k_BKSD = self.k_norm(self.k_proj(x_BSd).view(B, S, -1, self.head_dim)).transpose(1, 2)
        v_BKSD = self.v_proj(x_BSd).view(B, S, -1, self.head_dim).transpose(1, 2)
        q_BHSD = _rotate(q_BHSD, context)
        k_BKSD = _rotate(k_BKSD, context)
        if cache is not None:
            k_BKSD, v_BKSD = cache.extend(self.layer, k_BKSD, v_BKSD)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD,
            k_BKSD,
            v_BKSD,
            attn_mask=context.mask_B1SS,
            is_causal=context.mask_B1SS is None and k_BKSD.shape[2] == S,
            enable_gqa=True,
        )
        out_BSd: Tensor = self.o_proj(out_BHSD.transpose(1, 2).reshape(B, S, -1))
        return out_BSd


class DenseMLP(nn.Module):
    """SwiGLU MLP of the layers without experts."""

    def __init__(
        self, config: Qwen3MoeConfig, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden, inner, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotate(x_BHSD: Tensor, context: AttentionContext) -> Tensor:
    """Rotary position embedding, half-split convention (Su et al., 2021)."""
    half = x_BHSD.shape[-1] // 2
    turned_BHSD = torch.cat((-x_BHSD[..., half:], x_BHSD[..., :half]), dim=-1)
    return x_BHSD * context.cos_BSD[:, None] + turned_BHSD * context.sin_BSD[:, None]

"""Multi-head latent attention: keys and values of all heads come from one small latent per token.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) projects a token down to `kv_lora_rank` numbers and up
again to each head's key and value; only one rotary key per token, shared by all heads, stands
beside. Generation therefore keeps kv_lora_rank + qk_rope_head_dim numbers per token instead of
heads x (key + value), whatever the number of heads.

Invariant: parameters have the names and shapes of transformers' `DeepseekV2Attention` and
`DeepseekV3Attention`, and so have values and gradients.

    attention = LatentAttention(options, hidden_size=64, num_heads=4, layer=0, device=None,
                                dtype=torch.float32)
    y_BSd = attention(x_BSd, context, None)

Shape legend: B sequences, S positions, P positions with those in the cache, H heads,
d hidden size, C kv_lora_rank, R qk_rope_head_dim, N qk_nope_head_dim, Q = N + R, V v_head_dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_train.errors import TrainValueError
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.layers import (
    AttentionContext,
    explicit_attention,
    joined_heads,
    weight_dropout,
)
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import ALONE, HeadWidths, RingWidths, TensorParallel
from moe_train.model.rotary import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAOptions:
    """Sizes and rules of the attention; the names are those of transformers' configurations.

    Attributes:
        q_lora_rank: width of the queries' latent; None: queries come from the token directly.
        kv_lora_rank: width of the latent of keys and values.
        qk_nope_head_dim: width of a head's query and key that has no position.
        qk_rope_head_dim: width that is rotated; the rotary tables have it too.
        v_head_dim: width of a head's value.
        softmax_scale: factor of the scores; `(N + R) ** -0.5`, times YaRN's mscale squared.
        attention_bias: biases on the projections from and to the hidden size, without `q_proj`.
        rope_interleave: a pair that is rotated together lies side by side (V2 and V3 as
            published) instead of half a width apart.
        rms_norm_eps: of the norms of both latents. transformers' DeepSeek layers take their norm
            class' default, 1e-6, whatever the model's `rms_norm_eps` is.
        dropout: share of the attention weights that training drops.

    Raises:
        ValueError: a width that is not positive, an odd rotary width, a scale or eps not positive.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    attention_bias: bool
    rope_interleave: bool
    rms_norm_eps: float
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _check_width(name, getattr(self, name))
        if self.q_lora_rank is not None:
            _check_width("q_lora_rank", self.q_lora_rank)
        if self.qk_rope_head_dim % 2:
            raise TrainValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; rotary embeddings turn pairs, "
                "choose an even number"
            )
        for name in ("softmax_scale", "rms_norm_eps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise TrainValueError(f"{name}={value!r}; expected a positive finite number")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's whole query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def of_share(self, size: int) -> "MLAOptions":
        """Those of one of `size` ranks that share out the heads: the same."""
        return self

    def ring_widths(self, num_heads: int) -> RingWidths:
        """What ranks that share samples pass on of a position."""
        return RingWidths(num_kv_heads=num_heads, width=self.qk_head_dim + self.v_head_dim)

    def widths(self, num_heads: int) -> HeadWidths:
        """What ranks that share samples exchange of a position."""
        return HeadWidths(
            queries=(num_heads, self.qk_head_dim),
            keys=((1, self.kv_lora_rank), (1, self.qk_rope_head_dim)),
            out_width=self.v_head_dim,
        )


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 and V3; see the module's docstring.

    Args:
        options: widths and rules.
        hidden_size: width of a token.
        num_heads: heads of queries, keys and values.
        layer: number of the layer, for the cache.
        device, dtype: of the parameters.
        tp: ranks that share the heads; latents of own positions are gathered.
    """

    def __init__(
        self,
        options: MLAOptions,
        *,
        hidden_size: int,
        num_heads: int,
        layer: int,
        device: torch.device | None,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        self.options = options
        self.layer, self.tp = layer, tp
        self._first_head, num_heads = tp.share(num_heads).start, len(tp.share(num_heads))

        def linear(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=bias, device=device, dtype=dtype)

        queries = num_heads * options.qk_head_dim
        eps, bias = options.rms_norm_eps, options.attention_bias
        if options.q_lora_rank is None:
            self.q_proj = linear(hidden_size, queries)
        else:
            self.q_a_proj = linear(hidden_size, options.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(options.q_lora_rank, eps, device, dtype)
            self.q_b_proj = linear(options.q_lora_rank, queries)
        latent = options.kv_lora_rank
        self.kv_a_proj_with_mqa = linear(hidden_size, latent + options.qk_rope_head_dim, bias)
        self.kv_a_layernorm = RMSNorm(latent, eps, device, dtype)
        keys_and_values = options.qk_nope_head_dim + options.v_head_dim
        self.kv_b_proj = linear(latent, num_heads * keys_and_values)
        self.o_proj = linear(num_heads * options.v_head_dim, hidden_size, bias)

    def forward(
        self, x_BSd: Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> Tensor:
        """Attend within each document; with a cache, `x_BSd` continues the cached positions.

        The cache holds the normed latent and the rotated key, each as one head.

        Args:
            x_BSd: [B, S, d], in the dtype of the parameters.
            context: rotary tables of width R, and the mask: of these S positions, or with a cache
                [B, 1, S, P]; None: causal.
            cache: of the positions so far, which this batch continues.

        Raises:
            ValueError: rotary tables of another width.
        """
        self._check(context)
        into_BSd, latent_BPC, k_BPR = self._gathered(x_BSd)
        q_BHSQ = self._queries(into_BSd, context)
        latent_B1PC, k_rot_B1PR = latent_BPC[:, None], self._rotate(k_BPR[:, None], context)
        if cache is not None:
            latent_B1PC, k_rot_B1PR = cache.extend(self.layer, latent_B1PC, k_rot_B1PR)
        num_heads = q_BHSQ.shape[1]
        heads = range(num_heads)
        if context.ring is not None:
            k_BHSQ, v_BHSV = self._expand(latent_B1PC, k_rot_B1PR, heads, num_heads)
            scale = self.options.softmax_scale
            out_BHSV = context.ring.attend(q_BHSQ, k_BHSQ, v_BHSV, scale=scale)
            return joined_heads(out_BHSV, self.o_proj, self.tp)
        if context.exchange is not None:
            exchanged = context.exchange.to_heads(q_BHSQ, latent_B1PC, k_rot_B1PR)
            heads, (q_BHSQ, latent_B1PC, k_rot_B1PR) = exchanged
        k_BHPQ, v_BHPV = self._expand(latent_B1PC, k_rot_B1PR, heads, num_heads)
        out_BHSV = self._attend(q_BHSQ, k_BHPQ, v_BHPV, context, heads.start)
        if context.exchange is not None:
            out_BHSV = context.exchange.to_positions(out_BHSV, num_heads=num_heads)
        return joined_heads(out_BHSV, self.o_proj, self.tp)

    def _attend(
        self,
        q_BHSQ: Tensor,
        k_BHPQ: Tensor,
        v_BHPV: Tensor,
        context: AttentionContext,
        first_head: int,
    ) -> Tensor:
        """[B, H, S, V]"""
        options, mask = self.options, context.mask_B1SS
        p = options.dropout * self.training
        first_head += self._first_head
        drop = weight_dropout(p, self.layer, context, first_head=first_head)
        if drop is not None:
            return explicit_attention(
                q_BHSQ, k_BHPQ, v_BHPV, mask, scale=options.softmax_scale, drop=drop
            )
        queries, keys, mask = q_BHSQ.shape[2], k_BHPQ.shape[2], context.added_B1SS
        if mask is None and 1 < queries < keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q_BHSQ.device)
            mask = mask.tril(keys - queries)
        return F.scaled_dot_product_attention(
            q_BHSQ,
            k_BHPQ,
            v_BHPV,
            attn_mask=mask,
            is_causal=mask is None and queries == keys,
            scale=options.softmax_scale,
        )

    def _queries(self, into_BSd: Tensor, context: AttentionContext) -> Tensor:
        """[B, H, S, Q] of tokens, or of the queries' latents."""
        options = self.options
        last = self.q_proj if options.q_lora_rank is None else self.q_b_proj
        q_BHSQ = last(into_BSd).unflatten(-1, (-1, options.qk_head_dim)).transpose(1, 2)
        parts = q_BHSQ.split((options.qk_nope_head_dim, options.qk_rope_head_dim), dim=-1)
        return torch.cat((parts[0], self._rotate(parts[1], context)), dim=-1)

    def _gathered(self, x_BSd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the positions of all ranks of `tp` what queries are made from (tokens, or their
        latents), the normed latent [B, S, C] of keys and values, and the shared key [B, S, R].
        """
        options = self.options
        widths = (options.kv_lora_rank, options.qk_rope_head_dim)
        latent_BSC, k_BSR = self.kv_a_proj_with_mqa(x_BSd).split(widths, dim=-1)
        into = x_BSd
        if options.q_lora_rank is not None:
            into = self.q_a_layernorm(self.q_a_proj(x_BSd))
        latent_BSC = self.kv_a_layernorm(latent_BSC)
        if self.tp.size == 1:
            return into, latent_BSC, k_BSR
        together = self.tp.gather(torch.cat((into, latent_BSC, k_BSR), dim=-1))
        parts = together.split((into.shape[-1], *widths), dim=-1)
        return parts[0], parts[1], parts[2]

    def _expand(
        self, latent_B1PC: Tensor, k_rot_B1PR: Tensor, heads: range, num_heads: int
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, H, P, Q] and values [B, H, P, V] of these heads."""
        options = self.options
        widths = (options.qk_nope_head_dim, options.v_head_dim)
        if len(heads) == num_heads:
            flat = self.kv_b_proj(latent_B1PC[:, 0])
        else:
            rows = slice(heads.start * sum(widths), heads.stop * sum(widths))
            flat = F.linear(latent_B1PC[:, 0], self.kv_b_proj.weight[rows])
        k_BHPN, v_BHPV = flat.unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, dim=-1)
        k_rot_BHPR = k_rot_B1PR.expand(-1, k_BHPN.shape[1], -1, -1)
        return torch.cat((k_BHPN, k_rot_BHPR), dim=-1), v_BHPV

    def _rotate(self, x: Tensor, context: AttentionContext) -> Tensor:
        interleaved = self.options.rope_interleave
        return rotate(x, context.cos_BSD, context.sin_BSD, interleaved=interleaved)

    def _check(self, context: AttentionContext) -> None:
        width, expected = context.cos_BSD.shape[-1], self.options.qk_rope_head_dim
        if width != expected:
            raise TrainValueError(
                f"layer {self.layer} got rotary tables of width {width} but qk_rope_head_dim="
                f"{expected}; make the attention context with head_dim={expected}"
            )


def _check_width(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise TrainValueError(f"{name}={value!r}; expected a positive integer")

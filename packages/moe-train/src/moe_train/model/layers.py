"""Attention of the decoder, numerically that of transformers.

One attention serves every family with grouped queries: what differs (biases, norms of queries and
keys, rotation, sinks) is in `AttentionOptions`. DeepSeek's latent attention is in `model.mla`.

Packed sequences: a document starts where its position is 0, and a token attends to its own
document only (`model.documents`); a batch without inner document starts takes the fast causal path.

    rotary = RotaryOptions(dim=8, theta=1e4)
    contexts = attention_contexts(position_ids_BS, rotary, torch.float32, windows={None})
    y_BSd = Attention(options, hidden_size=32, layer=0, device=None, dtype=torch.float32)(
        x_BSd, contexts[None], None
    )

Shape legend: B sequences, S positions, P positions with those in the cache, H query heads,
K key/value heads, G = H / K, D head dim, d hidden size.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_pipeline.ops import counter_key, dropout
from moe_train.errors import TrainValueError
from moe_train.model.documents import added_mask, read_documents, token_places
from moe_train.model.kv_cache import KeyValueCache
from moe_train.model.norm import RMSNorm
from moe_train.model.parallel import (
    ALONE,
    HeadExchange,
    HeadWidths,
    RingAttention,
    RingWidths,
    SampleShare,
    TensorParallel,
    as_many_each,
    heads_read,
)
from moe_train.model.rotary import RotaryOptions, rotary_tables, rotate
from moe_train.model.token_numbers import ATTENTION, TokenNoise

QK_NORMS = ("none", "head", "projection")
_WHOLE_SAMPLES = SampleShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What grouped-query attention is made of.

    Attributes:
        num_heads, num_kv_heads, head_dim: sizes; `num_kv_heads` divides `num_heads`.
        qkv_bias, o_bias: whether the projections have biases.
        qk_norm: RMSNorm of queries and keys: "none", of each "head", or of the whole "projection"
            before it is split into heads (OLMoE).
        norm_eps: of those norms.
        clip_qkv: queries, keys and values are clamped to this absolute value; None: not.
        has_sinks: each head has a learnt logit that takes part in the softmax and attends to
            nothing (GPT-OSS).
        rope_interleaved: a rotated pair is (2i, 2i + 1).
        dropout: share of the attention weights that training drops.

    Raises:
        ValueError: heads do not divide, or an unknown norm.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = "none"
    norm_eps: float = 1e-6
    clip_qkv: float | None = None
    has_sinks: bool = False
    rope_interleaved: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise TrainValueError(
                f"config.json: num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}; choose a divisor"
            )
        if self.qk_norm not in QK_NORMS:
            raise TrainValueError(f"qk_norm={self.qk_norm!r}; choose one of {', '.join(QK_NORMS)}")

    def of_share(self, size: int) -> "AttentionOptions":
        """Those of one of `size` ranks that share out all heads."""
        each = self.num_heads // size, self.num_kv_heads // size
        return replace(self, num_heads=each[0], num_kv_heads=each[1])

    def ring_widths(self, num_heads: int) -> RingWidths:
        """What ranks that share samples pass on of a position."""
        return RingWidths(num_kv_heads=self.num_kv_heads, width=2 * self.head_dim)

    def widths(self, num_heads: int) -> HeadWidths:
        """What ranks that share samples exchange of a position."""
        keys = (self.num_kv_heads, self.head_dim)
        return HeadWidths(
            queries=(num_heads, self.head_dim), keys=(keys, keys), out_width=self.head_dim
        )


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What the layers share for one microbatch: rotary tables, attention mask, and its tokens.

    `cos_BSD`, `sin_BSD`: rotary tables, as wide as the rotated dims. `mask_B1SS`: boolean, True
    where attention is allowed (with a cache [B, 1, S, P]), or None for plain causal attention;
    `added_B1SS`: the same as `added_mask` makes it, once for all layers.
    `token_idx_N`: int64, the places in B * S that are no padding; None where there is none.
    `noise`: where training draws random numbers, their seed and the tokens' numbers in the run.
    `token_ids_T`: the numbers of this rank's tokens, where there are such.
    `exchange` or `ring`: with context parallelism. Where ranks share samples, `token_idx_N` and
    `token_ids_T` are those of this rank's positions, the tables those of its tensor-parallel ranks
    together, mask and `noise` those of all.
    """

    cos_BSD: Tensor
    sin_BSD: Tensor
    mask_B1SS: Tensor | None
    added_B1SS: Tensor | None
    token_idx_N: Tensor | None = None
    noise: TokenNoise | None = None
    token_ids_T: Tensor | None = None
    exchange: HeadExchange | None = None
    ring: RingAttention | None = None


def attention_contexts(
    position_ids_BS: Tensor,
    rotary: RotaryOptions,
    dtype: torch.dtype,
    *,
    windows: Collection[int | None],
    cache: KeyValueCache | None = None,
    noise: TokenNoise | None = None,
    share: SampleShare = _WHOLE_SAMPLES,
) -> dict[int | None, AttentionContext]:
    """The context of the layers with each of these windows.

    Args:
        position_ids_BS: int64; a document starts at each 0, and -1 is padding.
        dtype: of the activations.
        windows: a token attends to itself and `window - 1` tokens before it; None: to all.
        cache: of the tokens so far, which is told these positions.
        noise: of training that draws random numbers.
        share: with the ranks that share out these positions; no cache then.
    """
    cut, across = share.cut, share.across
    tables = [cut.outer.take(table) for table in rotary_tables(position_ids_BS, rotary, dtype)]
    if cache is not None:
        cache.add_positions(position_ids_BS)
        # After the first call each row goes on token by token, without padding.
        has_padding = cache.has_padding and position_ids_BS.shape[1] > 1
        tokens = token_places(position_ids_BS) if has_padding else None
        masks = {window: cache.mask(position_ids_BS, window) for window in windows}
    else:
        documents = read_documents(position_ids_BS)
        tokens = documents.token_idx_N
        if tokens is not None and share != _WHOLE_SAMPLES:
            tokens = token_places(cut.take(position_ids_BS))
        if isinstance(across, RingAttention):
            numbers_BS = documents.numbers() if documents.has_inner_starts else None
            across = replace(across, document_BS=numbers_BS)
            masks = dict.fromkeys(windows)
        else:
            masks = {window: documents.mask(window) for window in windows}
    ids_T = None if noise is None else cut.take(noise.token_ids_BS).flatten()
    exchange = across if isinstance(across, HeadExchange) else None
    ring = across if isinstance(across, RingAttention) else None
    return {
        w: AttentionContext(
            tables[0],
            tables[1],
            masks[w],
            added_mask(masks[w], dtype),
            tokens,
            noise,
            ids_T,
            exchange,
            None if ring is None else replace(ring, window=w),
        )
        for w in windows
    }


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings; see `AttentionOptions`.

    Args:
        options: what it is made of.
        hidden_size: width of a token.
        layer: number of the layer, for the cache.
        device, dtype: of the parameters.
        tp: ranks that share the heads. Keys and values are shared out with them where these divide;
            else each rank has the projections of all, and uses those of the heads that it reads.
    """

    def __init__(
        self,
        options: AttentionOptions,
        *,
        hidden_size: int,
        layer: int,
        device: torch.device | None,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        self.options = options
        self.layer, self.tp = layer, tp
        self._heads, self._kv_heads = tp.share(options.num_heads), range(options.num_kv_heads)
        if options.num_kv_heads % tp.size == 0:
            self._kv_heads = tp.share(options.num_kv_heads)
        queries = len(self._heads) * options.head_dim
        keys = len(self._kv_heads) * options.head_dim

        def linear(size_in: int, size_out: int, bias: bool) -> nn.Linear:
            return nn.Linear(size_in, size_out, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, queries, options.qkv_bias)
        self.k_proj = linear(hidden_size, keys, options.qkv_bias)
        self.v_proj = linear(hidden_size, keys, options.qkv_bias)
        self.o_proj = linear(queries, hidden_size, options.o_bias)
        if options.qk_norm != "none":
            per_head = options.qk_norm == "head"
            widths = (options.head_dim,) * 2 if per_head else (queries, keys)
            self.q_norm = RMSNorm(widths[0], options.norm_eps, device, dtype)
            self.k_norm = RMSNorm(widths[1], options.norm_eps, device, dtype)
        if options.has_sinks:
            self.sinks = nn.Parameter(torch.empty(len(self._heads), device=device, dtype=dtype))

    def forward(
        self, x_BSd: Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> Tensor:
        """Attend within each document; with a cache, `x_BSd` continues the cached positions.

        Collective over the ranks of `tp` and those that share samples.
        """
        q_BHSD, k_BKSD, v_BKSD = self._projections(self.tp.gather(x_BSd))
        interleaved = self.options.rope_interleaved
        q_BHSD = rotate(q_BHSD, context.cos_BSD, context.sin_BSD, interleaved=interleaved)
        k_BKSD = rotate(k_BKSD, context.cos_BSD, context.sin_BSD, interleaved=interleaved)
        if cache is not None:
            k_BKSD, v_BKSD = cache.extend(self.layer, k_BKSD, v_BKSD)
        if context.ring is not None:
            around_BHSD = context.ring.attend(
                q_BHSD,
                k_BKSD,
                v_BKSD,
                scale=self.options.head_dim**-0.5,
                sinks_H=self.sinks if self.options.has_sinks else None,
            )
            return joined_heads(around_BHSD, self.o_proj, self.tp)
        num_heads = q_BHSD.shape[1]
        heads = range(num_heads)
        if context.exchange is not None:
            heads, (q_BHSD, k_BKSD, v_BKSD) = context.exchange.to_heads(q_BHSD, k_BKSD, v_BKSD)
        p = self.options.dropout * self.training
        first_head = self._heads.start + heads.start
        drop = weight_dropout(p, self.layer, context, first_head=first_head)
        if self.options.has_sinks or drop is not None:
            out_BHSD = explicit_attention(
                q_BHSD,
                k_BKSD,
                v_BKSD,
                context.mask_B1SS,
                sinks_H=self.sinks[heads.start : heads.stop] if self.options.has_sinks else None,
                drop=drop,
            )
        else:
            out_BHSD = F.scaled_dot_product_attention(
                q_BHSD,
                k_BKSD,
                v_BKSD,
                attn_mask=context.added_B1SS,
                is_causal=context.mask_B1SS is None and k_BKSD.shape[2] == q_BHSD.shape[2],
                enable_gqa=True,
            )
        if context.exchange is not None:
            out_BHSD = context.exchange.to_positions(out_BHSD, num_heads=num_heads)
        return joined_heads(out_BHSD, self.o_proj, self.tp)

    def _projections(self, x_BSd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, S, D], keys and values [B, K, S, D], normed and clipped."""
        options = self.options
        q, k, v = self.q_proj(x_BSd), self._keys(self.k_proj, x_BSd), self._keys(self.v_proj, x_BSd)
        if options.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        if options.clip_qkv is not None:
            q, k, v = (x.clamp(-options.clip_qkv, options.clip_qkv) for x in (q, k, v))
        q, k, v = (x.unflatten(-1, (-1, options.head_dim)) for x in (q, k, v))
        if options.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q, k, v))
        if self._has_all_keys:
            each = options.num_heads // options.num_kv_heads
            k_BKSD, v_BKSD = (as_many_each(x, self._heads, each) for x in (k_BKSD, v_BKSD))
        return q_BHSD, k_BKSD, v_BKSD

    @property
    def _has_all_keys(self) -> bool:
        """Whether this rank has the projections of more heads than it reads."""
        return self.tp.size > 1 and len(self._kv_heads) == self.options.num_kv_heads

    def _keys(self, projection: nn.Linear, x_BSd: Tensor) -> Tensor:
        """Keys or values of the heads that this rank reads."""
        if not self._has_all_keys:
            found: Tensor = projection(x_BSd)
            return found
        options = self.options
        read = heads_read(self._heads, options.num_heads // options.num_kv_heads)
        rows = slice(read.start * options.head_dim, read.stop * options.head_dim)
        bias = None if projection.bias is None else projection.bias[rows]
        return F.linear(x_BSd, projection.weight[rows], bias)


def joined_heads(out_BHSD: Tensor, o_proj: nn.Linear, tp: TensorParallel) -> Tensor:
    """What attention returns for each head, [B, H, S, D], projected to the hidden size.

    Collective over the ranks of `tp`: of all their heads, at this rank's positions.
    """
    return tp.summed(out_BHSD.transpose(1, 2).flatten(2), o_proj)


def explicit_attention(
    q_BHSD: Tensor,
    k_BKPD: Tensor,
    v_BKPV: Tensor,
    mask_B1SP: Tensor | None,
    *,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention with the scores held in memory, in fp32 or wider: for what no kernel of torch does.

    Args:
        mask_B1SP: where attention is allowed; None: causal.
        scale: of the scores; None: D ** -0.5.
        sinks_H: one more logit per head, which takes part in the softmax and attends to nothing,
            so that the weights of a query add up to less than 1 (arXiv 2309.17453; GPT-OSS).
        drop: changes the weights [B, K, H / K, S, P].

    Returns:
        [B, H, S, V] in the dtype of the values.
    """
    B, H, S, D = q_BHSD.shape
    K, P = k_BKPD.shape[1], k_BKPD.shape[2]
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    q_BKGSD = q_BHSD.unflatten(1, (K, H // K))
    scores = (q_BKGSD @ k_BKPD[:, :, None].transpose(-1, -2)).to(wide)
    scores = scores.mul(D**-0.5 if scale is None else scale)
    if mask_B1SP is None:
        allowed = torch.ones(S, P, dtype=torch.bool, device=q_BHSD.device).tril(P - S)
        scores = scores.masked_fill(~allowed, -torch.inf)
    else:
        scores = scores.masked_fill(~mask_B1SP[:, :, None], -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(wide).view(1, K, H // K, 1, 1).expand(B, -1, -1, S, -1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :P].to(v_BKPV.dtype)
    return ((weights if drop is None else drop(weights)) @ v_BKPV[:, :, None]).flatten(1, 2)


def weight_dropout(
    p: float, layer: int, context: AttentionContext, *, first_head: int = 0
) -> Callable[[Tensor], Tensor] | None:
    """What drops a share `p` of attention weights, alike in every layout; None for a `p` of 0.

    `first_head`: the number of the first of the query heads that the weights are of.
    """
    noise = context.noise
    if p == 0.0:
        return None
    if noise is None:
        raise TrainValueError(
            f"attention_dropout={p} draws by token: give the context noise, or call eval()"
        )
    key, token_ids_BS = counter_key(noise.seed, layer, ATTENTION), noise.token_ids_BS

    def drop(weights_BKGSP: Tensor) -> Tensor:
        of_query = weights_BKGSP.permute(0, 3, 1, 2, 4)
        dropped = dropout(
            of_query.flatten(2),
            p=p,
            key=key,
            token_ids=token_ids_BS,
            training=True,
            first_column=first_head * of_query.shape[-1],
        )
        return dropped.view(of_query.shape).permute(0, 2, 3, 1, 4)

    return drop

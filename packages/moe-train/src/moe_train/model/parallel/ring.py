"""Ring attention: each rank keeps its queries, keys and values of all ranks come by.

In step i a rank computes with the keys of the i-th rank before it, while they travel on to the next
one (Liu et al., arXiv 2310.01889). Results of blocks are merged by their log-sum-exp, in fp32 or
wider (Milakov and Gimelshein, arXiv 1805.02867). The backward computes the weights of each block
again; gradients of keys travel with the keys and are home after the last step. With a folded cut
each rank has as much to do under a causal mask; blocks out of a window or ahead of the queries are
skipped.

Invariant: a token attends to what it attends to in one process, itself included.

    ring = RingAttention(group=group, cut=cut, num_positions=S, window=None, document_BS=None)
    out_BHPV = ring.attend(q_BHPD, k_BKPD, v_BKPV, scale=D**-0.5)

Shape legend: B sequences, S positions, P of them on this rank, L of a block of keys, T of a tile of
queries, H query heads, K key/value heads, G = H / K, D head dim, V of values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from comm_collectives import Handle, all_to_all
from moe_train.model.parallel.position_cut import PositionCut

_TILE_NUMBERS = 1 << 23  # of the scores that are there at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAttention:
    """Attention over samples that the ranks of a group share.

    Args:
        group: those ranks, in the order of the cut.
        cut: this rank's part.
        num_positions: of the whole samples.
        window: a token attends to itself and `window - 1` tokens before it; None: to all.
        document_BS: of each position the number of its document, of padding one of its own; None:
            rows are one document.
    """

    group: dist.ProcessGroup
    cut: PositionCut
    num_positions: int
    window: int | None = None
    document_BS: Tensor | None = None

    def attend(
        self,
        q_BHPD: Tensor,
        k_BKPD: Tensor,
        v_BKPV: Tensor,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Causal attention, [B, H, P, V]. Collective over the group, also in its backward.

        Args:
            scale: of the scores.
            sinks_H: a logit of each head that attends to nothing.
        """
        out: Tensor = _Ring.apply(self, scale, q_BHPD, k_BKPD, v_BKPV, sinks_H)
        return out

    def spans(self, rank: int) -> Iterator[tuple[int, slice]]:
        """Of a rank's runs the first position of each, and where it lies among the rank's own."""
        start = 0
        for run in self.cut.spans(self.num_positions)[rank]:
            yield run.start, slice(start, start + len(run))
            start += len(run)

    def blocks(self, source: int, like: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Tiles of this rank's queries with keys of another rank that they may attend to.

        Args:
            like: queries [B, H, P, D]; their number bounds the tiles.

        Yields:
            Where the queries and the keys lie, and boolean [B, T, L] or [1, T, L]: who attends to
            whom; None: all to all.
        """
        for first_key, keys in self.spans(source):
            length = keys.stop - keys.start
            tile = max(1, _TILE_NUMBERS // max(1, like.shape[0] * like.shape[1] * length))
            for first_query, queries in self.spans(self.cut.rank):
                for start in range(queries.start, queries.stop, tile):
                    count, first = (
                        min(tile, queries.stop - start),
                        first_query + start - queries.start,
                    )
                    if length and self._meets(first, count, first_key, length):
                        allowed = self._allowed(first, count, first_key, length, like.device)
                        yield slice(start, start + count), keys, allowed

    def pass_on(self, flat: Tensor, source: int) -> Handle[Tensor]:
        """Send what is of rank `source` to the next rank; gives what the one before passes on.

        Args:
            flat: [L, X], a row for each position.
        """
        rank, size = self.cut.rank, self.cut.size
        lengths = self.cut.lengths(self.num_positions)
        to, of = [0] * size, [0] * size
        to[(rank + 1) % size] = lengths[source]
        of[(rank - 1) % size] = lengths[source - 1]
        return all_to_all(flat, input_splits=to, output_splits=of, group=self.group, async_op=True)

    def _meets(self, query: int, queries: int, key: int, keys: int) -> bool:
        """Whether some query is behind some key, and within the window."""
        is_behind = query + queries > key
        return is_behind and (self.window is None or query - (key + keys - 1) < self.window)

    def _allowed(
        self, query: int, queries: int, key: int, keys: int, device: torch.device
    ) -> Tensor | None:
        # All keys are behind all queries, and the furthest two are within the window.
        is_whole = query >= key + keys - 1
        is_whole &= self.window is None or query + queries - 1 - key < self.window
        if is_whole and self.document_BS is None:
            return None
        behind_TL = torch.arange(query, query + queries, device=device)[:, None] - torch.arange(
            key, key + keys, device=device
        )
        allowed_BTL = (behind_TL >= 0)[None]
        if self.window is not None:
            allowed_BTL = allowed_BTL & (behind_TL < self.window)
        if self.document_BS is None:
            return allowed_BTL
        of_queries = self.document_BS[:, query : query + queries, None]
        return allowed_BTL & (of_queries == self.document_BS[:, None, key : key + keys])


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWidths:
    """What ranks pass on of a position: key/value heads, and the width of a key with its value."""

    num_kv_heads: int
    width: int

    def sent(self, cut: PositionCut, num_positions: int) -> tuple[int, int, int]:
        """Numbers that the rank of a cut sends of one sample: keys and values in forward, the same
        in backward, and their gradients, which are in fp32 or wider.
        """
        lengths, each = cut.lengths(num_positions), self.num_kv_heads * self.width
        keys = each * (num_positions - lengths[(cut.rank + 1) % cut.size])
        return keys, keys, each * num_positions


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: RingAttention,
        scale: float,
        q_BHPD: Tensor,
        k_BKPD: Tensor,
        v_BKPV: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        wide = torch.promote_types(q_BHPD.dtype, torch.float32)
        shape = q_BHPD.shape[:3]
        out_BHPV = v_BKPV.new_zeros((*shape, v_BKPV.shape[3]), dtype=wide)
        log_sum_BHP = out_BHPV.new_full(shape, -torch.inf)
        for source, k_BKLD, v_BKLV in _keys(ring, k_BKPD, v_BKPV):
            for queries, keys, allowed in ring.blocks(source, q_BHPD):
                scores = _scores(q_BHPD[:, :, queries], k_BKLD[:, :, keys], allowed, scale)
                before = log_sum_BHP[:, :, queries]
                after = torch.logaddexp(before, scores.logsumexp(dim=-1))
                # Queries that have met no key of theirs so far stay at 0.
                finite = after.masked_fill(after == -torch.inf, 0.0)
                weights = scores.sub_(finite[..., None]).exp_()
                met = out_BHPV[:, :, queries] * (before - finite).exp()[..., None]
                out_BHPV[:, :, queries] = met + _by_head(weights, v_BKLV[:, :, keys])
                log_sum_BHP[:, :, queries] = after
        if sinks_H is not None:
            with_sinks = torch.logaddexp(log_sum_BHP, sinks_H.to(wide)[:, None])
            out_BHPV *= (log_sum_BHP - with_sinks).exp()[..., None]
            log_sum_BHP = with_sinks
        out_BHPV = out_BHPV.to(v_BKPV.dtype)
        ctx.ring, ctx.scale = ring, scale
        ctx.save_for_backward(q_BHPD, k_BKPD, v_BKPV, sinks_H, out_BHPV, log_sum_BHP)
        return out_BHPV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHPV: Tensor) -> tuple[Tensor | None, ...]:
        ring, scale = ctx.ring, ctx.scale
        q_BHPD, k_BKPD, v_BKPV, sinks_H, out_BHPV, log_sum_BHP = ctx.saved_tensors
        wide = log_sum_BHP.dtype
        grad_BHPV = grad_BHPV.to(wide)
        dot_BHP = (grad_BHPV * out_BHPV).sum(dim=-1)
        grad_q = torch.zeros_like(q_BHPD, dtype=wide)
        passing = _PassedGradients(ring, (*k_BKPD.shape[:2], k_BKPD.shape[3], v_BKPV.shape[3]))
        for source, k_BKLD, v_BKLV in _keys(ring, k_BKPD, v_BKPV):
            grad_k, grad_v = passing.take(source, k_BKLD, wide)
            for queries, keys, allowed in ring.blocks(source, q_BHPD):
                q, k, v = q_BHPD[:, :, queries], k_BKLD[:, :, keys], v_BKLV[:, :, keys]
                grad = grad_BHPV[:, :, queries]
                weights = _scores(q, k, allowed, scale)
                weights = weights.sub_(log_sum_BHP[:, :, queries, None]).exp_()
                grad_v[:, :, keys] += _of_keys(weights, grad, k.shape[1])
                change = _by_head(grad, v.transpose(-1, -2)).sub_(dot_BHP[:, :, queries, None])
                change = change.mul_(weights).mul_(scale)
                grad_q[:, :, queries] += _by_head(change, k)
                grad_k[:, :, keys] += _of_keys(change, q, k.shape[1])
            passing.pass_on(source, grad_k, grad_v)
        grad_k, grad_v = passing.take(ring.cut.rank, k_BKPD, wide)
        grad_sinks = None
        if sinks_H is not None:
            attended = (sinks_H.to(wide)[:, None] - log_sum_BHP).exp_()
            grad_sinks = attended.mul_(dot_BHP).sum(dim=(0, 2)).neg_().to(sinks_H.dtype)
        grads = (x.to(q_BHPD.dtype) for x in (grad_q, grad_k, grad_v))
        return None, None, *grads, grad_sinks


class _PassedGradients:
    """Gradients of keys and values on their way with these: those of a rank go once around.

    Args:
        sizes: B, K, D and V.
    """

    def __init__(self, ring: RingAttention, sizes: tuple[int, int, int, int]) -> None:
        self._ring, self._sizes = ring, sizes
        self._coming: Handle[Tensor] | None = None

    def take(self, source: int, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of a rank so far, [B, K, L, D] and [B, K, L, V]."""
        batch, heads, of_keys, of_values = self._sizes
        length = self._ring.cut.lengths(self._ring.num_positions)[source]
        shape = (length, batch, heads, of_keys + of_values)
        if self._coming is None:
            both = torch.zeros(shape, dtype=dtype, device=like.device)
        else:
            both = self._coming.wait().view(shape)
        found = both.permute(1, 2, 0, 3).split((of_keys, of_values), dim=-1)
        return found[0], found[1]

    def pass_on(self, source: int, grad_k: Tensor, grad_v: Tensor) -> None:
        """Send them to the next rank."""
        self._coming = self._ring.pass_on(_packed(grad_k, grad_v), source)


def _keys(
    ring: RingAttention, k_BKPD: Tensor, v_BKPV: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values of each rank, this one's first; the next ones travel meanwhile."""
    size, rank = ring.cut.size, ring.cut.rank
    lengths = ring.cut.lengths(ring.num_positions)
    batch, heads, _, of_keys = k_BKPD.shape
    flat = _packed(k_BKPD, v_BKPV)
    for step in range(size):
        source = (rank - step) % size
        coming = ring.pass_on(flat, source) if step < size - 1 else None
        shape = (lengths[source], batch, heads, of_keys + v_BKPV.shape[3])
        both = flat.view(shape).permute(1, 2, 0, 3)
        yield source, both[..., :of_keys], both[..., of_keys:]
        if coming is not None:
            flat = coming.wait()


def _packed(k_BKLD: Tensor, v_BKLV: Tensor) -> Tensor:
    """[L, B * K * (D + V)]: a row for each position."""
    both = torch.cat((k_BKLD, v_BKLV), dim=-1)
    return both.permute(2, 0, 1, 3).flatten(1)


def _scores(q_BHTD: Tensor, k_BKLD: Tensor, allowed_BTL: Tensor | None, scale: float) -> Tensor:
    """[B, H, T, L] in fp32 or wider; -inf where a query does not attend.

    A product is not changed in place: selective recompute may keep it.
    """
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    scores = _by_head(q_BHTD.to(wide), k_BKLD.transpose(-1, -2)) * scale
    return scores if allowed_BTL is None else scores.masked_fill_(~allowed_BTL[:, None], -torch.inf)


def _by_head(x_BHTX: Tensor, y_BKXY: Tensor) -> Tensor:
    """The product of each query head with what it reads, [B, H, T, Y]."""
    batch, heads, tile, _ = x_BHTX.shape
    rows = x_BHTX.reshape(batch, y_BKXY.shape[1], -1, x_BHTX.shape[3])
    return (rows @ y_BKXY.to(x_BHTX.dtype)).view(batch, heads, tile, y_BKXY.shape[3])


def _of_keys(x_BHTL: Tensor, y_BHTY: Tensor, num_kv_heads: int) -> Tensor:
    """`x^T y` summed over the query heads that read a head, [B, K, L, Y]."""
    batch = x_BHTL.shape[0]
    x = x_BHTL.reshape(batch, num_kv_heads, -1, x_BHTL.shape[3])
    y = y_BHTY.reshape(batch, num_kv_heads, -1, y_BHTY.shape[3])
    return x.transpose(-1, -2) @ y.to(x.dtype)

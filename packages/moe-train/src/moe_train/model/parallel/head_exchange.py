"""All-to-all attention: each rank attends over whole samples with some of the heads.

A rank has all heads of its own positions. One all-to-all before attention gives it all positions of
its own heads, one after it brings the results back (DeepSpeed-Ulysses, arXiv 2309.14509). Since
attention then sees what one process sees, masks, windows, sinks and dropout need nothing else.

Heads need not divide by the ranks: consecutive ranks have consecutive runs of query heads, the
longer ones first. Keys and values are sent to every rank with a query head that reads them, so
that there may be fewer of them than ranks; their gradients come back from all of those and are
summed. The latent of latent attention is such a head, which all query heads read.

    own, (q_BhSD, k_BkSD, v_BkSD) = exchange.to_heads(q_BHPD, k_BKPD, v_BKPD)
    out_BHPD = exchange.to_positions(attend(q_BhSD, k_BkSD, v_BkSD), num_heads=H)

Shape legend: B sequences, S positions, P of them on this rank, H query heads, h of them attended
with on this rank, K key/value heads, k of them read here, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from comm_collectives import all_to_all
from moe_train.errors import TrainValueError
from moe_train.model.parallel.position_cut import PositionCut


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadExchange:
    """Heads for positions among the ranks that share samples.

    Args:
        group: those ranks, in the order of their positions.
        cut: this rank's part; not folded.
        num_positions: of the whole samples.
    """

    group: dist.ProcessGroup
    cut: PositionCut
    num_positions: int

    def to_heads(self, q_BHPD: Tensor, *keys_BKPD: Tensor) -> tuple[range, list[Tensor]]:
        """All positions of this rank's heads. Collective over the group, also in its backward.

        Args:
            q_BHPD: queries of all heads.
            keys_BKPD: keys, values and the like; a K divides H.

        Returns:
            This rank's query heads, and the tensors, [B, h, S, D] and [B, k, S, D] where k divides
            h: as many heads for each of them, in order.

        Raises:
            ValueError: fewer heads than ranks.
        """
        num_heads = q_BHPD.shape[1]
        shares = _shares(num_heads, self.cut.size)
        if not shares[-1]:
            raise TrainValueError(
                f"{self.cut.size} ranks cannot share out {num_heads} attention heads; use as many "
                "ranks at most"
            )
        heads = [_read_by(shares, num_heads // x.shape[1]) for x in (q_BHPD, *keys_BKPD)]
        found = self._to_heads((q_BHPD, *keys_BKPD), heads)
        own = shares[self.cut.rank]
        for place, x in enumerate(keys_BKPD, start=1):
            found[place] = as_many_each(found[place], own, num_heads // x.shape[1])
        return own, found

    def to_positions(self, out_BhSD: Tensor, *, num_heads: int) -> Tensor:
        """All heads of this rank's positions [B, H, P, D]. Collective, also in its backward."""
        lengths, size = self.cut.lengths(self.num_positions), self.cut.size
        batch, _, _, width = out_BhSD.shape
        parts = out_BhSD.split(lengths, dim=2)
        shapes = [
            (batch, len(share), lengths[self.cut.rank], width) for share in _shares(num_heads, size)
        ]
        received = self._exchange([[part] for part in parts], [[shape] for shape in shapes])
        return torch.cat([part for (part,) in received], dim=1)

    def _to_heads(
        self, tensors: Sequence[Tensor], heads: Sequence[Sequence[range]]
    ) -> list[Tensor]:
        """Of tensor i the heads `heads[i][rank]`, at all positions."""
        lengths, rank = self.cut.lengths(self.num_positions), self.cut.rank
        parts = [
            [
                x[:, read[peer].start : read[peer].stop]
                for x, read in zip(tensors, heads, strict=True)
            ]
            for peer in range(self.cut.size)
        ]
        shapes = [
            [
                (x.shape[0], len(read[rank]), length, x.shape[3])
                for x, read in zip(tensors, heads, strict=True)
            ]
            for length in lengths
        ]
        received = self._exchange(parts, shapes)
        return [torch.cat(pieces, dim=2) for pieces in zip(*received, strict=True)]

    def _exchange(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Send `parts[rank]` to each rank in one all-to-all; `shapes[rank]` is what each sends."""
        counts = [[prod(shape) for shape in of_rank] for of_rank in shapes]
        flat = all_to_all(
            torch.cat([part.flatten() for of_rank in parts for part in of_rank]),
            input_splits=[sum(part.numel() for part in of_rank) for of_rank in parts],
            output_splits=[sum(of_rank) for of_rank in counts],
            group=self.group,
        )
        pieces = iter(flat.split([count for of_rank in counts for count in of_rank]))
        return [[next(pieces).view(shape) for shape in of_rank] for of_rank in shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWidths:
    """What attention exchanges of a position: (heads, width) of queries, of keys and the like, and
    the width of a query head's result.
    """

    queries: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    out_width: int

    def sent(self, cut: PositionCut, num_positions: int) -> tuple[int, int]:
        """Numbers that the rank of a cut sends of one sample, in forward and in backward."""
        num_heads, lengths = self.queries[0], cut.lengths(num_positions)
        shares, own = _shares(num_heads, cut.size), lengths[cut.rank]
        read = [0] * cut.size
        for heads, width in (self.queries, *self.keys):
            for rank, each in enumerate(_read_by(shares, num_heads // heads)):
                read[rank] += len(each) * width
        results, others = len(shares[cut.rank]) * self.out_width, num_positions - own
        there, back = own * (sum(read) - read[cut.rank]), results * others
        there_again = read[cut.rank] * others
        back_again = own * (num_heads * self.out_width - results)
        return there + back, there_again + back_again


def _shares(num_heads: int, size: int) -> list[range]:
    """The query heads of each rank."""
    each, longer = divmod(num_heads, size)
    starts = [rank * each + min(rank, longer) for rank in range(size + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _read_by(shares: Sequence[range], queries_each: int) -> list[range]:
    """The heads that the query heads of each rank read, where `queries_each` read one."""
    return [heads_read(share, queries_each) for share in shares]


def heads_read(own: range, queries_each: int) -> range:
    """The heads that these query heads read, where `queries_each` read one."""
    return range(own.start // queries_each, -(-own.stop // queries_each))


def as_many_each(x_BkSD: Tensor, own: range, queries_each: int) -> Tensor:
    """`x_BkSD` so that as many query heads read each head; the same where that is so."""
    first = own.start // queries_each
    reads = [head // queries_each - first for head in own]
    k = x_BkSD.shape[1]
    if len(own) % k == 0 and reads == [place // (len(own) // k) for place in range(len(own))]:
        return x_BkSD
    return x_BkSD.index_select(1, torch.tensor(reads, device=x_BkSD.device))

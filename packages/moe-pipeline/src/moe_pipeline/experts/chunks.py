"""Chunks of neighbouring experts, and the permutation between tokens and rows.

    permutation = Permutation.of(order_R, num_tokens, num_choices)
    for chunk in expert_chunks(num_tokens_per_expert, max_rows(x_TD, intermediate_size)):
        chunk.products(permutation.permute(chunk, x_TD), weights, chunk.slice(out_RN))

Dims: R routed rows sorted by expert, S the R rows or T tokens that are given, K choices of a token.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_pipeline.weight_grad import GradTarget

# Elements of a chunk's [rows, H] intermediate. It bounds the memory of what is computed again; each
# chunk costs some Python, which is slow between products that have emptied the cache.
_CPU_CHUNK_ELEMENTS = 1 << 21
_OTHER_CHUNK_ELEMENTS = 1 << 24


class ExpertChunk(NamedTuple):
    """Neighbouring experts that are worked on together: rows [start, end) and who owns which."""

    start: int
    end: int
    experts: tuple[int, ...]  # only those with rows
    counts: tuple[int, ...]  # rows of each of them

    def slice(self, rows: Tensor) -> Tensor:
        """The chunk's part of a tensor of all rows."""
        return rows[self.start : self.end]

    def split(self, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """(expert, its part of each tensor) for tensors of the chunk's rows."""
        return zip(self.experts, *(r.split(self.counts) for r in rows), strict=True)

    def products(self, rows: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
        """Each expert's rows times its weight, into its part of `out`."""
        # Between two products all else is out of the cache, and every line of Python counts: one
        # split for all experts costs a fraction of as many slices.
        mine = [weights[expert] for expert in self.experts]
        pieces = zip(rows.split(self.counts), mine, out.split(self.counts), strict=True)
        for row, weight, to in pieces:
            torch.mm(row, weight, out=to)

    def outer_products(self, target: GradTarget | None, left: Tensor, right: Tensor) -> None:
        """Each expert's `left.t() @ right`, where it is wanted."""
        if target is not None:
            lefts = left.t().split(self.counts, dim=1)
            target.write(self.experts, lefts, right.split(self.counts))


def expert_chunks(num_tokens_per_expert: Sequence[int], max_rows: int) -> Iterator[ExpertChunk]:
    """Experts that have rows, in chunks of at most about `max_rows`."""
    start = end = 0
    experts: list[int] = []
    counts: list[int] = []
    for expert, count in enumerate(num_tokens_per_expert):
        if experts and end - start + count > max_rows:
            yield ExpertChunk(start, end, tuple(experts), tuple(counts))
            start, experts, counts = end, [], []
        if count:
            experts.append(expert)
            counts.append(count)
            end += count
    if experts:
        yield ExpertChunk(start, end, tuple(experts), tuple(counts))


def max_rows(x_RD: Tensor, intermediate_size: int) -> int:
    """Rows of a chunk whose activations [rows, H] are of a good size for the device."""
    on_cpu = x_RD.device.type == "cpu"
    elements = _CPU_CHUNK_ELEMENTS if on_cpu else _OTHER_CHUNK_ELEMENTS
    return max(1, elements // max(1, intermediate_size))


class Permutation(NamedTuple):
    """How tokens become rows and rows become tokens; without an order rows stay rows."""

    token_R: Tensor | None  # whose token each row is
    row_SK: Tensor | None  # where each choice of a token went; R: nowhere

    @staticmethod
    def of(order_R: Tensor | None, num_sources: int, num_choices: int) -> "Permutation":
        """Of this order of choices; None: what is given are rows, which stay as they are."""
        if order_R is None:
            return Permutation(None, None)
        rows = order_R.shape[0]
        row_SK = order_R.new_full((num_sources * num_choices,), rows)
        row_SK[order_R] = torch.arange(rows, device=order_R.device)
        token_R = order_R.div(max(1, num_choices), rounding_mode="floor")
        return Permutation(token_R, row_SK.view(num_sources, num_choices))

    def permute(self, chunk: ExpertChunk, sources: Tensor) -> Tensor:
        """The chunk's rows of tokens, or of rows."""
        if self.token_R is None:
            return chunk.slice(sources)
        return sources.index_select(0, chunk.slice(self.token_R))

    def new_rows(self, like: Tensor, num_rows: int) -> Tensor:
        """Memory for all rows, to be given to `unpermute` when they are written."""
        if self.row_SK is None:
            return like.new_empty(num_rows, like.shape[1])
        # One more row, of zeros, for choices that went nowhere.
        rows = like.new_empty(num_rows + 1, like.shape[1])
        rows[num_rows].zero_()
        return rows

    def unpermute(self, rows: Tensor) -> Tensor:
        """Each token's sum over its choices, in their order and in fp32 for half precision."""
        if self.row_SK is None:
            return rows
        if self.row_SK.numel() == 0:
            return rows.new_zeros(self.row_SK.shape[0], rows.shape[1])
        return F.embedding_bag(self.row_SK, rows, mode="sum")

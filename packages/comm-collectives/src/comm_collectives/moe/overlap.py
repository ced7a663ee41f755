"""Compute the experts of some tokens while the rows of the next are on their way.

Tokens are cut into chunks. While the experts of a chunk run, the rows of the next chunk travel out
and those of the chunk before travel back, on the group's own thread. Every rank makes the same
calls in the same order, whatever its number of tokens.

    overlapped = OverlappedMoe(num_experts=64, group=ep_group, num_chunks=2)
    out = overlapped(x, topk_idx, topk_weights, experts)      # experts(Dispatched) -> rows
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from comm_collectives.call.groups import Group, check_integer
from comm_collectives.call.handles import Caught
from comm_collectives.errors import CommValueError
from comm_collectives.moe.dispatch_combine import (
    Dispatched,
    combine_async,
    dispatch_async,
    refuse_combine,
)
from comm_collectives.moe.options import DEFAULT_OPTIONS, MoeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedMoe:
    """dispatch, experts and combine in chunks; the settings are those of `dispatch`.

    Attributes:
        num_chunks: into how many pieces each rank's tokens are cut; the same on every rank. More
            hide more of the transfer and make each piece less efficient.

    Raises:
        TypeError: `num_chunks` is no integer.
        ValueError: it is not positive, or `options.reuse` is given.
    """

    num_experts: int
    group: Group | None = None
    num_chunks: int = 2
    expert_alignment: int = 1
    options: MoeOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        check_integer(self.num_chunks, "num_chunks")
        if self.num_chunks < 1:
            raise CommValueError(f"num_chunks={self.num_chunks} must be at least 1")
        if getattr(self.options, "reuse", None) is not None:
            raise CommValueError("options.reuse is of one dispatch, here are several; leave it out")

    def __call__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Callable[[Dispatched], torch.Tensor],
    ) -> torch.Tensor:
        """Return what dispatch, experts and combine give for all tokens at once, up to rounding.

        Collective over the group. Differentiable; the backward is not overlapped.

        Args:
            x: [T, D], topk_idx: [T, K], topk_weights: [T, K]; see `dispatch`. T may be 0 here.
            experts: called once for each chunk, in the caller's thread; returns rows as `combine`
                takes them, weights applied.

        Raises:
            RefusedError: the experts raised on a rank (on every rank).
            As dispatch and combine.
        """
        pieces = [_in_chunks(t, self.num_chunks) for t in (x, topk_idx, topk_weights)]
        chunks = list(zip(*pieces, strict=True))
        start = partial(
            dispatch_async,
            num_experts=self.num_experts,
            group=self.group,
            expert_alignment=self.expert_alignment,
            options=self.options,
        )
        coming = start(*chunks[0])
        returning = []
        failed = Caught(Exception)
        for i in range(self.num_chunks):
            sent = coming.wait()
            if i + 1 < self.num_chunks:
                coming = start(*chunks[i + 1])
            # All ranks make the same calls to the end, also those whose experts raise.
            if failed.error is None:
                with failed:
                    rows = experts(sent)
            if failed.error is None:
                returning.append(combine_async(rows, sent.handle))
            else:
                returning.append(refuse_combine(sent.handle, failed.error))
        return torch.cat([handle.wait() for handle in returning])


def _in_chunks(t: torch.Tensor, num_chunks: int) -> Sequence[torch.Tensor]:
    """Cut tokens; what cannot be cut goes whole into each chunk, whose dispatch refuses it."""
    can_be_cut = isinstance(t, torch.Tensor) and t.dim() > 0
    return t.tensor_split(num_chunks) if can_be_cut else [t] * num_chunks

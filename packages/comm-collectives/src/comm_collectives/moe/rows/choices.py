"""The choices of this rank's tokens in expert order, and sums over the rows of each token.

Invariant: there is no scattered addition. The rows of a token are summed in a fixed order, one bag
of rows per token (torch's EmbeddingBag), so that results repeat bit for bit.

Legend: T tokens, K choices per token, N choices that name an expert, M rows, D hidden size.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch.nn.functional import embedding_bag

from comm_collectives.errors import CommValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Which rows belong together, in the order of the sum.

    Attributes:
        slots: [T, K] with equally many rows to each bag, else [N], bag after bag.
        offsets: [T], where each bag begins in [N]; None for [T, K].
    """

    slots: torch.Tensor
    offsets: torch.Tensor | None = None

    def at(self, position_N: torch.Tensor | None) -> "Bags":
        """Return the bags of rows of which row j stands at `position_N[j]`; None: at j."""
        if position_N is None:
            return self
        return Bags(slots=position_N.take(self.slots), offsets=self.offsets)

    def sum(self, y_MD: torch.Tensor) -> torch.Tensor:
        """Return the sum of each bag's rows, [T, D]; zeros for an empty bag."""
        return embedding_bag(self.slots, y_MD, self.offsets, mode="sum")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SortedChoices:
    """The choices in expert order; `order_N` indexes the flat choices [T * K]."""

    order_N: torch.Tensor
    num_tokens: int
    num_choices: int
    counts_E: tuple[int, ...]

    @property
    def token_N(self) -> torch.Tensor:
        """The token of each sorted choice."""
        return self.order_N.div(max(1, self.num_choices), rounding_mode="floor")

    def bags(self, position_N: torch.Tensor) -> Bags:
        """Return each token's rows in the order of its choices; `position_N`: where they are."""
        if self._is_whole:
            slot = torch.empty_like(position_N).scatter_(0, self.order_N, position_N)
            return Bags(slots=slot.view(self.num_tokens, self.num_choices))
        ordered_N, sorted_N = self.order_N.sort()
        token_N = ordered_N.div(max(1, self.num_choices), rounding_mode="floor")
        return bags_of(token_N, position_N.index_select(0, sorted_N), self.num_tokens)

    def sorted_weights(self, weight_TK: torch.Tensor) -> torch.Tensor:
        """Return the weight of each sorted choice."""
        return weight_TK.reshape(-1).index_select(0, self.order_N)

    def unsorted_weights(self, weight_N: torch.Tensor) -> torch.Tensor:
        """Return [T, K]: each weight at its choice, zeros at choices that name no expert."""
        shape = (self.num_tokens, self.num_choices)
        if self._is_whole:
            flat = weight_N.new_empty(weight_N.shape)
        else:
            flat = weight_N.new_zeros(self.num_tokens * self.num_choices)
        return flat.scatter_(0, self.order_N, weight_N).view(shape)

    def describes(self, topk_idx_TK: torch.Tensor) -> bool:
        """Whether these are exactly the choices in `topk_idx_TK`."""
        if tuple(topk_idx_TK.shape) != (self.num_tokens, self.num_choices):
            return False
        flat, device = topk_idx_TK.reshape(-1), topk_idx_TK.device
        if device != self.order_N.device:
            return False
        counts = torch.tensor(self.counts_E, dtype=torch.int64, device=device)
        expert_N = torch.arange(len(self.counts_E), device=device).repeat_interleave(counts)
        if not torch.equal(flat.index_select(0, self.order_N), expert_N):
            return False
        return self._is_whole or int((flat != -1).sum()) == self.order_N.numel()

    @property
    def _is_whole(self) -> bool:
        """Whether every choice names an expert, so that bags are rows of a matrix."""
        return 0 < self.num_tokens * self.num_choices == self.order_N.numel()


def sort_choices(topk_idx_TK: torch.Tensor, num_experts: int) -> SortedChoices:
    """Sort the choices by expert, those of one expert by token.

    Raises:
        ValueError: a choice is neither -1 nor an expert.
    """
    expert_N, order_N = topk_idx_TK.reshape(-1).sort(stable=True)
    edges = torch.arange(-1, num_experts + 1, device=order_N.device)
    # Where the choices of none, of each expert, and of what is no expert, begin: one wait.
    begin, *begins = torch.searchsorted(expert_N, edges).tolist()
    if begin > 0 or begins[-1] < order_N.numel():
        choice = int(expert_N[0] if begin else expert_N[-1])
        raise CommValueError(
            f"topk_idx holds {choice} but num_experts={num_experts}; every choice must be an "
            f"expert in 0..{num_experts - 1}, or -1 for none"
        )
    return SortedChoices(
        order_N=order_N[begins[0] :],
        num_tokens=topk_idx_TK.shape[0],
        num_choices=topk_idx_TK.shape[1],
        counts_E=tuple(last - first for first, last in pairwise(begins)),
    )


def bags_of(bag_N: torch.Tensor, position_N: torch.Tensor, num_bags: int) -> Bags:
    """Return the rows at `position_N` as bags, row j in bag `bag_N[j]`, in their present order."""
    sorted_N, order_N = bag_N.sort(stable=True)
    # No bincount, for which the host waits on accelerators.
    offsets = torch.searchsorted(sorted_N, torch.arange(num_bags, device=bag_N.device))
    return Bags(slots=position_N.index_select(0, order_N), offsets=offsets)

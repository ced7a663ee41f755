"""One rank holds all experts: rows are reordered, and rounded as on a wire, not exchanged.

Legend: that of moe/routes/routing.py.
"""

from collections.abc import Sequence
from typing import final

import torch

from comm_collectives.moe.routes.routing import Leg, Routing, local_places
from comm_collectives.moe.rows import SortedChoices, plan_placing


@final
class LocalRouting(Routing):
    """Route within this rank."""

    def __init__(self, choices: SortedChoices, alignment: int) -> None:
        self._choices = choices
        self._placing = plan_placing([choices.counts_E], alignment=alignment)
        self._local_N = local_places(self._placing, choices.order_N.device)
        self.num_tokens_per_expert = self._placing.num_tokens_per_expert

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`; nobody tells anything."""

    def to_experts(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_experts`."""
        weight_N = self._choices.sorted_weights(weight_TK)
        return self.rows_to_experts(x_TD, leg), self._pad(weight_N)

    def rows_to_experts(self, x_TD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_experts`."""
        return self._pad(_rounded(x_TD, leg).index_select(0, self._choices.token_N))

    def rows_to_tokens(self, y_RD: torch.Tensor, leg: Leg) -> torch.Tensor:
        """See `Routing.rows_to_tokens`."""
        return self._choices.bags(self._local_N).sum(_rounded(y_RD, leg))

    def to_tokens(
        self, y_RD: torch.Tensor, weight_R: torch.Tensor, leg: Leg
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Routing.to_tokens`."""
        weight_N = weight_R.index_select(0, self._local_N)
        return self.rows_to_tokens(y_RD, leg), self._choices.unsorted_weights(weight_N)

    def _pad(self, rows_N: torch.Tensor) -> torch.Tensor:
        if not self._placing.is_padded:
            return rows_N
        padded = rows_N.new_zeros((self._placing.num_rows, *rows_N.shape[1:]))
        return padded.index_copy_(0, self._local_N, rows_N)


def _rounded(x_ND: torch.Tensor, leg: Leg) -> torch.Tensor:
    form = leg.form(x_ND.shape[1], x_ND.dtype)
    return form.decode(form.encode(x_ND))

"""One rank holds all experts: rows are reordered, and rounded as on a wire, not exchanged.

Legend: that of moe/routes/routing.py.
"""

from collections.abc import Sequence
from typing import final

import torch

from comm_collectives.moe.routes.routing import Carried, Leg, Routing
from comm_collectives.moe.rows import SortedChoices, plan_placing


@final
class LocalRouting(Routing):
    """Route within this rank."""

    def __init__(self, choices: SortedChoices, alignment: int) -> None:
        self._choices, device = choices, choices.order_N.device
        self._placing = plan_placing([choices.counts_E], alignment=alignment, device=device)
        self.num_tokens_per_expert = self._placing.num_tokens_per_expert

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`; nobody tells anything."""

    def to_experts(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_experts`."""
        choices, placing = self._choices, self._placing
        x_RD = placing.gather(_rounded(sent[0], leg), choices.token_N)
        return (x_RD, *(placing.gather(w.reshape(-1), choices.order_N) for w in sent[1:]))

    def to_tokens(self, sent: Carried, leg: Leg) -> Carried:
        """See `Routing.to_tokens`."""
        choices, local_N = self._choices, self._placing.local_N
        y_TD = choices.bags(local_N).sum(_rounded(sent[0], leg))
        weights = [w.index_select(0, local_N) for w in sent[1:]]
        return (y_TD, *map(choices.unsorted_weights, weights))


def _rounded(x_ND: torch.Tensor, leg: Leg) -> torch.Tensor:
    form = leg.form(x_ND.shape[1], x_ND.dtype, ())
    return form.decode(form.encode(x_ND))

"""From one row per token and rank to one row per token and expert, and back: local, no exchange.

A transport that sends a token once to each rank delivers it with the local experts that want it.
Experts need their rows together; the way back sums a token's rows. There is no scattered addition:
each token's rows are summed in the order of its choices, so results repeat bit for bit.

    e = plan_expansion(expert_UK, counts_L=(3, 1), alignment=4)
    y_UD = e.fold(experts(e.expand(x_UD)))

Legend: U received tokens, D hidden size, K choices per token, N routed rows received, R rows with
padding, L local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.moe.rows import Bags, Placing, plan_placing


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """Where received tokens stand among the rows of the local experts.

    `choice_N` numbers the choices (token times K plus choice) that are for this rank, expert by
    expert, and `placing` has their rows; `bags` holds the same rows for each token, in the order of
    its choices.
    """

    choice_N: torch.Tensor
    placing: Placing
    bags: Bags
    shape_UK: tuple[int, int]

    def expand(self, x_UD: torch.Tensor) -> torch.Tensor:
        """Copy each token to the rows of its experts: [R, D], padding zero."""
        token_N = self.choice_N.div(self.shape_UK[1], rounding_mode="floor")
        return self.placing.gather(x_UD, token_N)

    def expand_weights(self, weight_UK: torch.Tensor) -> torch.Tensor:
        """Bring each choice's weight to its row: [R], padding zero."""
        return self.placing.gather(weight_UK.reshape(-1), self.choice_N)

    def fold(self, y_RD: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each token in the order of its choices: [U, D]; padding is ignored."""
        return self.bags.sum(y_RD)

    def fold_weights(self, weight_R: torch.Tensor) -> torch.Tensor:
        """Bring each row's weight back to its choice: [U, K], zero for other ranks' choices."""
        flat = weight_R.new_zeros(self.shape_UK).view(-1)
        flat.index_copy_(0, self.choice_N, weight_R.index_select(0, self.placing.local_N))
        return flat.view(self.shape_UK)


def plan_expansion(
    expert_UK: torch.Tensor,
    counts_L: Sequence[int],
    alignment: int,
    *,
    source_U: torch.Tensor | None = None,
) -> Expansion:
    """Plan the expert-major form of received tokens; no copy to the host.

    Args:
        expert_UK: [U, K] the local expert of each choice, -1 where another rank has it.
        counts_L: how often each local expert occurs in it.
        alignment: each expert's rows are padded to a multiple of this.
        source_U: [U] where each token comes from: the tokens of one expert stand in its order; None
            for the order in which they came.
    """
    num_tokens, num_choices = expert_UK.shape
    device = expert_UK.device
    came_U = torch.arange(num_tokens, device=device) if source_U is None else source_U.argsort()
    flat = expert_UK.index_select(0, came_U).reshape(-1).long()
    # Other ranks' choices sort behind all local experts.
    key = torch.where(flat < 0, len(counts_L), flat)
    sorted_N = torch.argsort(key, stable=True)[: sum(counts_L)]
    token_N = came_U[sorted_N.div(num_choices, rounding_mode="floor")]
    choice_N = token_N * num_choices + sorted_N % num_choices
    placing = plan_placing([counts_L], alignment=alignment, device=device)
    here_U = (expert_UK >= 0).sum(1)
    slots = placing.local_N.index_select(0, torch.argsort(choice_N))
    return Expansion(
        choice_N=choice_N,
        placing=placing,
        bags=Bags(slots=slots, offsets=here_U.cumsum(0) - here_U),
        shape_UK=(num_tokens, num_choices),
    )

"""Routes straight to the ranks of the experts: a row for each choice, or one for each rank.

Legend: that of moe/routes/routing.py.
"""

from collections.abc import Sequence
from typing import final

from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.routing import Arriving, Hop, HopRouting
from comm_collectives.moe.routes.sources import plan_rows, plan_source
from comm_collectives.moe.rows import SortedChoices, plan_placing


@final
class RankRouting(HopRouting):
    """Each rank is told its number of rows, then the choices for each of its experts.

    With `shares_rows` a token goes once to each rank, however many of its experts are there.
    `combine` adds a token's rows per rank first, then the ranks' sums, so results can differ from
    the flat route's in the last bits.
    """

    def __init__(
        self, choices: SortedChoices, state: GroupState, alignment: int, *, shares_rows: bool
    ) -> None:
        self._alignment = alignment
        counts_WL = counts_by_rank(choices, state)
        choices_W = tuple(map(sum, counts_WL))
        if shares_rows:
            source = plan_source(choices.token_N, choices.num_tokens, choices_W)
        else:
            source = plan_rows(choices, choices_W)
        self.told = [(n, *row) for n, row in zip(source.rows_P, counts_WL, strict=True)]
        super().__init__(choices, state, Hop(state, range(state.size), choices_W, source=source))

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`."""
        rows_W, counts_WL = [told[0] for told in told_W], [told[1:] for told in told_W]
        device = self._choices.order_N.device
        placing = plan_placing(counts_WL, alignment=self._alignment, device=device)
        self.num_tokens_per_expert = placing.num_tokens_per_expert
        self._hops[0].arriving = Arriving(rows_W, tuple(map(sum, counts_WL)), placing)


def counts_by_rank(choices: SortedChoices, state: GroupState) -> list[tuple[int, ...]]:
    """Return the choices for each expert of each rank."""
    counts_E = choices.counts_E
    num_local = len(counts_E) // state.size
    return [counts_E[at : at + num_local] for at in range(0, len(counts_E), num_local)]

"""The de-duplicated route: a token goes once to each rank, however many of its experts are there.

One hop (moe/routes/hops.py) from each rank to each. `combine` adds a token's rows per rank first,
then the ranks' sums, so results can differ from the flat route's in the last bits.

    proposal = DedupProposal(choices, state)
    routing = proposal.routing(received, alignment=1)

Legend: W ranks, L local experts.
"""

from collections.abc import Sequence
from typing import final

from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.flat import counts_by_rank
from comm_collectives.moe.routes.hops import Hop, HopPlan, hop_routing, plan_source
from comm_collectives.moe.routes.routing import RouteRequest, Routing
from comm_collectives.moe.rows import SortedChoices, plan_placing


@final
class DedupRequest(RouteRequest):
    """Each rank is told its number of rows, then the choices for each of its experts."""

    def __init__(self, choices: SortedChoices, state: GroupState) -> None:
        self._choices, self._state = choices, state
        counts_WL = counts_by_rank(choices, state)
        self._sent_choices_W = tuple(sum(row) for row in counts_WL)
        self._source = plan_source(choices.token_N, choices.num_tokens, self._sent_choices_W)
        self.counts = [(n, *row) for n, row in zip(self._source.rows_P, counts_WL, strict=True)]

    def routing(self, received: Sequence[Sequence[int]], *, alignment: int) -> Routing:
        """Return the routing, given what each rank told this one."""
        placing = plan_placing([told[1:] for told in received], alignment=alignment)
        plan = HopPlan(
            peers=tuple(range(self._state.size)),
            sent_choices_P=self._sent_choices_W,
            received_rows_P=tuple(told[0] for told in received),
            received_choices_P=tuple(sum(told[1:]) for told in received),
            placing=placing,
        )
        hop = Hop(plan, self._state, self._source)
        return hop_routing(self._choices, [hop], placing.num_tokens_per_expert)

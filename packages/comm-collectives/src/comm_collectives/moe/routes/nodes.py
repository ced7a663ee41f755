"""The hierarchical route: a token goes once to each node, and is forwarded inside it.

A node is `ranks_per_node` consecutive ranks of the group. Two hops: between the ranks of equal
local index, one per node, then from each of them to the ranks of its node:

    rank 1 --> ranks 1, 5, 9 ... (between nodes)        5 --> ranks 4, 5, 6, 7 (inside the node)

Both are all-to-alls of the whole group with zero splits elsewhere: no group is made. `combine` adds
per rank, then per node, then over the nodes.

Legend: W ranks, M nodes, S ranks of a node, L local experts per rank.
"""

from collections.abc import Sequence
from typing import final

from comm_collectives.call.groups import GroupState
from comm_collectives.moe.routes.ranks import counts_by_rank
from comm_collectives.moe.routes.routing import Arriving, Hop, HopRouting
from comm_collectives.moe.routes.sources import count_unique, plan_source
from comm_collectives.moe.rows import SortedChoices, plan_placing


@final
class NodeRouting(HopRouting):
    """Each rank is told: rows for its node, rows for itself, choices per expert of its node."""

    def __init__(
        self, choices: SortedChoices, state: GroupState, alignment: int, ranks_per_node: int
    ) -> None:
        self._alignment, self._per_node = alignment, ranks_per_node
        counts_WL = counts_by_rank(choices, state)
        self._num_local = len(counts_WL[0])
        token_N, num_tokens = choices.token_N, choices.num_tokens
        choices_W = [sum(row) for row in counts_WL]
        nodes = range(0, state.size, ranks_per_node)
        choices_M = tuple(sum(choices_W[at : at + ranks_per_node]) for at in nodes)
        source = plan_source(token_N, num_tokens, choices_M)
        rank_rows_W = count_unique(token_N, num_tokens, choices_W)
        experts_M = [[n for row in counts_WL[i : i + ranks_per_node] for n in row] for i in nodes]
        node_W = [rank // ranks_per_node for rank in range(state.size)]
        self.told = [
            (source.rows_P[node], rank_rows_W[rank], *experts_M[node])
            for rank, node in enumerate(node_W)
        ]
        # The ranks with this one's local index.
        self._peers = range(state.rank % ranks_per_node, state.size, ranks_per_node)
        super().__init__(choices, state, Hop(state, self._peers, choices_M, source=source))

    def learn(self, told_W: Sequence[Sequence[int]]) -> None:
        """See `Routing.learn`."""
        counts_MX = [told_W[peer][2:] for peer in self._peers]
        self._hops[0].arriving = Arriving(
            [told_W[peer][0] for peer in self._peers],
            [sum(row) for row in counts_MX],
            plan_placing(counts_MX, alignment=1, device=self._choices.order_N.device),
        )
        self._hops[1:] = [self._inside([row[1] for row in told_W], [row[2:] for row in told_W])]

    def _inside(self, rows_W: Sequence[int], counts_WX: Sequence[Sequence[int]]) -> Hop:
        """The hop inside the node: each of its ranks forwards what it had from everywhere."""
        state, per_node, num_local = self._state, self._per_node, self._num_local
        local = state.rank % per_node
        first = state.rank - local
        own_WL = [row[local * num_local : (local + 1) * num_local] for row in counts_WX]
        sources_SM = [range(s, state.size, per_node) for s in range(per_node)]
        blocks = [(w, e) for ranks in sources_SM for e in range(num_local) for w in ranks]
        forwarded = [counts_WX[w] for w in sources_SM[local]]
        forwarded_X = [sum(counts) for counts in zip(*forwarded, strict=True)]
        ends = range(0, per_node * num_local, num_local)
        sent_P = [sum(forwarded_X[at : at + num_local]) for at in ends]
        device = self._choices.order_N.device
        placing = plan_placing(own_WL, alignment=self._alignment, device=device, blocks=blocks)
        self.num_tokens_per_expert = placing.num_tokens_per_expert
        arriving = Arriving(
            [sum(rows_W[w] for w in ranks) for ranks in sources_SM],
            [sum(sum(own_WL[w]) for w in ranks) for ranks in sources_SM],
            placing,
        )
        return Hop(state, range(first, first + per_node), sent_P, arriving=arriving)

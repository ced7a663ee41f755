"""Which node keeps copies of which, and who sends what: pure data, alike on every rank.

Nodes stand in a ring, in the order of their lowest rank; the copies of one are on those that follow
it. So no node keeps its own, each keeps as many as any other, and any number of nodes will do.

    plan = CopyPlan.of(["a", "a", "b", "b", "c"], copies=1)
    plan.nodes == ((0, 1), (2, 3), (4,))
    plan.keepers(2) == (0,)
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unified_ckpt.tiers.copies import NodeCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The nodes of a job.

    Attributes:
        names: of the nodes.
        nodes: the ranks of each node, ascending.
        copies: how many other nodes hold a copy of each, at most all others.
    """

    names: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    copies: int

    @classmethod
    def of(cls, names: Sequence[str], *, copies: int) -> "CopyPlan":
        """Make the plan from the name of every rank's node."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            ranks.setdefault(name, []).append(rank)
        nodes = tuple(tuple(found) for found in ranks.values())
        return cls(names=tuple(ranks), nodes=nodes, copies=min(copies, len(nodes) - 1))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if rank in ranks)

    def keepers(self, node: int) -> tuple[int, ...]:
        """Return the other nodes that hold copies of a node, the next one first."""
        return tuple((node + step) % len(self.nodes) for step in range(1, self.copies + 1))

    def kept_by(self, node: int) -> tuple[int, ...]:
        """Return the other nodes whose copies a node holds."""
        return tuple((node - step) % len(self.nodes) for step in range(1, self.copies + 1))


class Move(NamedTuple):
    """A copy goes from one node to another."""

    copy: NodeCopy
    source: int
    target: int


def plan_copies(plan: CopyPlan, copies: Sequence[NodeCopy]) -> list[Move]:
    """Return who sends its new copy where; `copies[node]` is each node's own."""
    return [
        Move(copies[node], node, keeper)
        for node in range(len(plan.nodes))
        for keeper in plan.keepers(node)
    ]


def plan_restore(plan: CopyPlan, held: Mapping[int, Collection[NodeCopy]]) -> list[Move]:
    """Return what each node lacks of its own ranks, and of those whose copies it keeps.

    Those who hold much are asked in turn. The nodes may be others than those that saved.

    Args:
        plan: of the nodes that are there now.
        held: the copies of one state on each node.
    """
    holders: dict[str, list[int]] = {}
    known: dict[str, NodeCopy] = {}
    for node, copies in held.items():
        for copy in copies:
            known[copy.name] = copy
            holders.setdefault(copy.name, []).append(node)
    moves: list[Move] = []
    for node in range(len(plan.nodes)):
        ranks = {rank for other in (node, *plan.kept_by(node)) for rank in plan.nodes[other]}
        for name in sorted(known):
            if ranks.intersection(known[name].ranks) and node not in holders[name]:
                sources = holders[name]
                moves.append(Move(known[name], sources[len(moves) % len(sources)], node))
    return moves


def newest_state(
    held: Mapping[int, Collection[NodeCopy]], *, world_size: int, at_least: int = 0
) -> tuple[int, str] | None:
    """Return step and token of the newest state of which the nodes hold a copy of every rank.

    Args:
        held: the copies on each node.
        world_size: ranks of the job; states of others are none of its own.
        at_least: the least step that counts.
    """
    ranks: dict[tuple[int, str], set[int]] = {}
    for copies in held.values():
        for copy in copies:
            if copy.world_size == world_size and copy.step >= at_least:
                ranks.setdefault((copy.step, copy.token), set()).update(copy.ranks)
    whole = [state for state, found in ranks.items() if len(found) == world_size]
    return max(whole, default=None)

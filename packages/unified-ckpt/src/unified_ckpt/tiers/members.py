"""The ranks of a tier: which node each is on, and the gloo groups that they speak over.

The groups are the tier's own, on the host, also where training uses another backend; they end with
the default group, since torch may give a later one of the same ranks the same name.

    members = Members.meet(TierOptions(folder="/dev/shm/my-run"), group=None)
    members.plan.names[members.node]
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unified_ckpt.errors import SaveArgumentError
from unified_ckpt.saving.commit import Agreement
from unified_ckpt.tiers.options import TierOptions
from unified_ckpt.tiers.plan import CopyPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """All ranks of a tier, and this one among them.

    Attributes:
        plan: the nodes, by numbers of ranks in the tier.
        ranks: their numbers in the world.
        rank: of this process.
        node: the number of its node.
        folder: of its node.
        group: of all ranks.
        node_group: of the node's ranks.
        timeout_s: bound on each wait.
    """

    plan: CopyPlan
    ranks: tuple[int, ...]
    rank: int
    node: int
    folder: Path
    group: dist.ProcessGroup | None
    node_group: dist.ProcessGroup | None
    timeout_s: float

    @classmethod
    def meet(cls, options: TierOptions, *, group: dist.ProcessGroup | None) -> "Members":
        """Let all ranks of a group know each other; collective.

        Raises:
            SaveArgumentError: ranks ask for other numbers of copies, or ranks of one node name
                other folders. On every rank.
        """
        agreement = Agreement(group, timeout_s=options.timeout_s, subject="NodeTier")
        mine = {
            "node": options.node_name,
            "copies": options.copies,
            "folder": str(options.path),
        }
        plan = _plan(agreement.gather("meet", mine))
        if plan.copies < options.copies and agreement.rank == 0:
            logger.warning(
                "tier: %d nodes, so each has %d copies on others instead of %d",
                len(plan.nodes),
                plan.copies,
                options.copies,
            )
        ranks = tuple(agreement.global_rank(rank) for rank in range(agreement.size))
        node = plan.node_of(agreement.rank)
        return cls(
            plan=plan,
            ranks=ranks,
            rank=agreement.rank,
            node=node,
            folder=options.path,
            group=_new_group(ranks, options.timeout_s),
            node_group=_new_group([ranks[rank] for rank in plan.nodes[node]], options.timeout_s),
            timeout_s=options.timeout_s,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its node, which alone changes names in the folder."""
        return self.plan.nodes[self.node][0] == self.rank

    def by_node(self, results: Sequence[Any]) -> list[Any]:
        """Return what the first rank of every node said, of what all ranks did."""
        return [results[ranks[0]] for ranks in self.plan.nodes]

    def agreement(self, call: str) -> Agreement:
        """Begin an agreement of all ranks about a call."""
        subject = f"NodeTier({str(self.folder)!r}).{call}"
        return Agreement(self.group, timeout_s=self.timeout_s, subject=subject)


def _plan(told: Sequence[dict[str, Any]]) -> CopyPlan:
    """Check what all ranks said, and plan from it."""
    copies = [other["copies"] for other in told]
    if len(set(copies)) > 1:
        raise SaveArgumentError(
            f"NodeTier: ranks disagree about copies: {copies}; pass the same on every rank"
        )
    plan = CopyPlan.of([other["node"] for other in told], copies=copies[0])
    for name, ranks in zip(plan.names, plan.nodes, strict=True):
        folders = sorted({told[rank]["folder"] for rank in ranks})
        if len(folders) > 1:
            raise SaveArgumentError(
                f"NodeTier: the ranks {list(ranks)} of node {name!r} name several folders: "
                f"{folders}; pass one for each node"
            )
    return plan


def _new_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup | None:
    """Make a gloo group of some ranks of the world; only they take part."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    made: Any = dist.new_group(
        list(ranks),
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
    )
    group: dist.ProcessGroup = made
    return group

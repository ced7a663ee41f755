"""The process groups of an MoE layer: made once by the caller, handed in, never asked of a global.

    MoEGroups(ep=ep_group, tokens=dp_ep_group)

Groups that contradict each other would still run, and give wrong sums: so what one rank can see of
that is refused when they are put together.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_pipeline._checks import check_limit
from moe_pipeline.errors import MoETypeError, MoEValueError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoEGroups:
    """Who shares what; None means that this rank has all of it.

    Attributes:
        ep: ranks over which the experts are split, in contiguous blocks by rank in the group; each
            brings its own tokens. May span any part of dp x tp.
        ep_parts: experts of each rank of ep, in its order, such as (3, 1, 4); a rank may have none.
            None: all have as many. The same on every rank.
        etp: ranks that hold slices of the same experts (expert tensor parallelism); each brings its
            own tokens.
        tp: ranks that share the inner width of the shared expert, which are ranks of `sequence`:
            neighbours, with runs of positions as equal as can be, the longer ones first.
        tokens: all ranks that hold tokens of the same global microbatch (dp, ep, cp, sequence
            parallel), in the order of their tokens.
        sequence: ranks over which each sequence is split (cp, sequence parallel), in order.
        timeout_s: limit for each exchange; None: that of the group.

    Raises:
        TypeError: a group that this rank is not in.
        ValueError: ep and etp share a rank besides this one; or ep, etp, tp or sequence has a rank
            that `tokens` lacks, or tp one that `sequence` lacks; or `ep_parts` has not a number for
            each rank of ep; or `timeout_s` is not above 0.
    """

    ep: ProcessGroup | None = None
    ep_parts: tuple[int, ...] | None = None
    etp: ProcessGroup | None = None
    tokens: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_limit("groups.timeout_s", self.timeout_s)
        axes = {name: _ranks(name, getattr(self, name)) for name in ("ep", "etp", "sequence", "tp")}
        shared = sorted(set(axes["ep"]) & set(axes["etp"]))
        if len(shared) > 1:
            raise MoEValueError(
                f"groups.ep has the ranks {axes['ep']}, groups.etp {axes['etp']}: ranks that hold "
                f"slices of the same experts cannot hold different ones, and {shared} would do "
                "both; lay the axes with fold_experts"
            )
        tokens = _ranks("tokens", self.tokens)
        if not tokens and any(axes.values()):
            tokens = [dist.get_rank()]
        for name, ranks in axes.items():
            if not set(ranks) <= set(tokens):
                raise MoEValueError(
                    f"groups.{name} has the ranks {ranks}, groups.tokens {tokens}; each rank "
                    "brings tokens of the same microbatch, so give a groups.tokens that contains "
                    "them all"
                )
        if not set(axes["tp"]) <= set(axes["sequence"]):
            raise MoEValueError(
                f"groups.tp has the ranks {axes['tp']}, groups.sequence {axes['sequence']}; ranks "
                "of tp share out the positions of the same sequences, so give a groups.sequence "
                "that contains them all"
            )
        self._check_parts()

    def local_experts(self, num_experts: int) -> int:
        """How many of a layer's experts this rank holds.

        Raises:
            ValueError: they do not divide by the ranks of ep, or are not the sum of `ep_parts`.
        """
        if self.ep_parts is None:
            if num_experts % self.ep_size:
                raise MoEValueError(
                    f"ep axis has {self.ep_size} ranks but num_experts={num_experts}; choose a "
                    f"divisor of {num_experts}, or say by ep_parts how many each rank holds"
                )
            return num_experts // self.ep_size
        if sum(self.ep_parts) != num_experts:
            raise MoEValueError(
                f"groups.ep_parts={self.ep_parts} are {sum(self.ep_parts)} experts, but "
                f"num_experts={num_experts}; each expert is on one rank of ep"
            )
        return self.ep_parts[0 if self.ep is None else dist.get_rank(self.ep)]

    def _check_parts(self) -> None:
        parts = self.ep_parts
        if parts is None:
            return
        if not isinstance(parts, tuple) or not all(type(n) is int for n in parts):
            raise MoETypeError(f"groups.ep_parts is {parts!r}; give a tuple of integers, or None")
        if len(parts) != self.ep_size or min(parts) < 0:
            raise MoEValueError(
                f"groups.ep_parts={parts} for {self.ep_size} ranks of ep; give the number of "
                "experts of each rank, 0 or more"
            )

    @property
    def ep_size(self) -> int:
        """Ranks that share the experts."""
        return 1 if self.ep is None else dist.get_world_size(self.ep)

    @property
    def etp_size(self) -> int:
        """Ranks that share each expert."""
        return 1 if self.etp is None else dist.get_world_size(self.etp)

    @property
    def tp_size(self) -> int:
        """Ranks that share the shared expert."""
        return 1 if self.tp is None else dist.get_world_size(self.tp)

    @property
    def etp_rank(self) -> int:
        """Which slice of each expert this rank holds."""
        return 0 if self.etp is None else dist.get_rank(self.etp)


def _ranks(name: str, group: object) -> list[int]:
    """The global ranks of a group, in its order; none of None."""
    if group is None:
        return []
    if not isinstance(group, ProcessGroup):
        raise MoETypeError(
            f"groups.{name} is {group!r}, which is what a rank outside of a group gets instead of "
            "it; give the group that this rank is in, or None"
        )
    return dist.get_process_group_ranks(group)


ALONE = MoEGroups()  # this rank has all of it

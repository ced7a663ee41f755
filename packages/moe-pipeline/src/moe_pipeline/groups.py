"""The process groups of an MoE layer: made once by the caller, handed in, never asked of a global.

MoEGroups(ep=ep_group, tokens=dp_ep_group)
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoEGroups:
    """Who shares what; None means that this rank has all of it.

    Attributes:
        ep: ranks over which the experts are split, in equal contiguous blocks by rank in the group;
            each brings its own tokens. May span any part of dp x tp.
        etp: ranks that hold slices of the same experts (expert tensor parallelism); each brings its
            own tokens.
        tokens: all ranks that hold tokens of the same global micro-batch (dp, ep, cp, sequence
            parallel), in the order of their tokens.
        sequence: ranks over which each sequence is split (cp, sequence parallel), in order.
        timeout_s: limit for each exchange; None: that of the group.
    """

    ep: ProcessGroup | None = None
    etp: ProcessGroup | None = None
    tokens: ProcessGroup | None = None
    sequence: ProcessGroup | None = None
    timeout_s: float | None = None

    @property
    def ep_size(self) -> int:
        """Ranks that share the experts."""
        return 1 if self.ep is None else dist.get_world_size(self.ep)

    @property
    def etp_size(self) -> int:
        """Ranks that share each expert."""
        return 1 if self.etp is None else dist.get_world_size(self.etp)

    @property
    def etp_rank(self) -> int:
        """Which slice of each expert this rank holds."""
        return 0 if self.etp is None else dist.get_rank(self.etp)

"""Which positions of its samples a rank has, and how attention sees those of other ranks.

share = SampleShare(cut=cut, across=HeadExchange(group=group, cut=cut.outer, num_positions=S))
"""

from dataclasses import dataclass

from moe_train.model.parallel.head_exchange import HeadExchange
from moe_train.model.parallel.position_cut import WHOLE, PositionCut
from moe_train.model.parallel.ring import RingAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """What a rank has of its samples.

    Args:
        cut: its positions.
        across: attention beyond what its tensor-parallel ranks have together (`cut.outer`); None:
            these are whole samples.
    """

    cut: PositionCut = WHOLE
    across: HeadExchange | RingAttention | None = None

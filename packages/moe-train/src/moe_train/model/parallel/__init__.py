"""Parts of a decoder that several ranks compute together: context parallelism.

Outside of attention a rank has its own positions, as if it were one more data-parallel rank; here
is who has which positions, and how attention sees all of them.

May import: errors; comm_collectives. Groups are handed in.
"""

from moe_train.model.parallel.head_exchange import HeadExchange as HeadExchange
from moe_train.model.parallel.head_exchange import HeadWidths as HeadWidths
from moe_train.model.parallel.position_cut import WHOLE as WHOLE
from moe_train.model.parallel.position_cut import PositionCut as PositionCut
from moe_train.model.parallel.ring import RingAttention as RingAttention
from moe_train.model.parallel.ring import RingWidths as RingWidths

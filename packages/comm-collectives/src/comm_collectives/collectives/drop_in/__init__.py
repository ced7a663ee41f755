"""The same with torch's names, argument order and output tensors, for code that has those.

May import: base, call, collectives.
"""

from comm_collectives.collectives.drop_in.torch_order import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from comm_collectives.collectives.drop_in.torch_order import all_reduce as all_reduce
from comm_collectives.collectives.drop_in.torch_order import all_to_all_single as all_to_all_single
from comm_collectives.collectives.drop_in.torch_order import broadcast as broadcast
from comm_collectives.collectives.drop_in.torch_order import (
    reduce_scatter_tensor as reduce_scatter_tensor,
)

"""The same with torch's names, argument order and output tensors, for code that has those.

Catalogue: torch's functions, and what puts all of them in place of torch's.

May import: base, call, collectives.
"""

from comm_collectives.collectives.drop_in.lists import all_gather as all_gather
from comm_collectives.collectives.drop_in.lists import all_gather_coalesced as all_gather_coalesced
from comm_collectives.collectives.drop_in.lists import all_to_all as all_to_all
from comm_collectives.collectives.drop_in.lists import gather as gather
from comm_collectives.collectives.drop_in.lists import scatter as scatter
from comm_collectives.collectives.drop_in.patching import patched_torch as patched_torch
from comm_collectives.collectives.drop_in.reductions import all_reduce as all_reduce
from comm_collectives.collectives.drop_in.reductions import (
    all_reduce_coalesced as all_reduce_coalesced,
)
from comm_collectives.collectives.drop_in.reductions import reduce as reduce
from comm_collectives.collectives.drop_in.reductions import reduce_scatter as reduce_scatter
from comm_collectives.collectives.drop_in.reductions import (
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from comm_collectives.collectives.drop_in.swapped import both_splits as both_splits
from comm_collectives.collectives.drop_in.torch_order import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from comm_collectives.collectives.drop_in.torch_order import all_to_all_single as all_to_all_single
from comm_collectives.collectives.drop_in.torch_order import barrier as barrier
from comm_collectives.collectives.drop_in.torch_order import broadcast as broadcast
from comm_collectives.collectives.drop_in.transfers import irecv as irecv
from comm_collectives.collectives.drop_in.transfers import isend as isend
from comm_collectives.collectives.drop_in.transfers import recv as recv
from comm_collectives.collectives.drop_in.transfers import send as send
from comm_collectives.collectives.drop_in.works import CallWork as CallWork
from comm_collectives.collectives.drop_in.works import op_name as op_name

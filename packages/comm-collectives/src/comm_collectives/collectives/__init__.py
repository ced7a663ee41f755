"""Collectives that are right for every shape, dtype and stride, and differentiable.

Catalogue: collectives, and the same as steps of other calls (`*_call`).

May import: base, call.
"""

from comm_collectives.collectives.alltoall import all_to_all as all_to_all
from comm_collectives.collectives.alltoall import checked_splits as checked_splits
from comm_collectives.collectives.alltoall import compare_splits as compare_splits
from comm_collectives.collectives.arithmetic import check_op as check_op
from comm_collectives.collectives.arithmetic import reduce_into as reduce_into
from comm_collectives.collectives.broadcasting import broadcast as broadcast
from comm_collectives.collectives.broadcasting import broadcast_call as broadcast_call
from comm_collectives.collectives.buckets import reduce_in_buckets as reduce_in_buckets
from comm_collectives.collectives.exchange import exchange_bytes as exchange_bytes
from comm_collectives.collectives.exchange import on_host as on_host
from comm_collectives.collectives.exchange import swap as swap
from comm_collectives.collectives.gathers import all_gather as all_gather
from comm_collectives.collectives.gathers import all_gather_call as all_gather_call
from comm_collectives.collectives.gathers import reduce_scatter as reduce_scatter
from comm_collectives.collectives.gathers import reduce_scatter_call as reduce_scatter_call
from comm_collectives.collectives.overlap import overlap_gradients as overlap_gradients
from comm_collectives.collectives.pieces import Device as Device
from comm_collectives.collectives.pieces import broadcast_bytes as broadcast_bytes
from comm_collectives.collectives.pieces import checked_device as checked_device
from comm_collectives.collectives.pieces import row_arguments as row_arguments
from comm_collectives.collectives.reduction import all_reduce as all_reduce
from comm_collectives.collectives.reduction import all_reduce_call as all_reduce_call
from comm_collectives.collectives.rooted import gather as gather
from comm_collectives.collectives.rooted import scatter as scatter

"""Tensors as bytes: every dtype travels as uint8, since moving data needs no arithmetic.

May import: no other room.
"""

from comm_collectives.base.wire import DTYPES as DTYPES
from comm_collectives.base.wire import as_bytes as as_bytes
from comm_collectives.base.wire import bytes_of as bytes_of
from comm_collectives.base.wire import check_apart as check_apart
from comm_collectives.base.wire import check_dense as check_dense
from comm_collectives.base.wire import check_tensors as check_tensors
from comm_collectives.base.wire import dense as dense
from comm_collectives.base.wire import dtype_code as dtype_code
from comm_collectives.base.wire import from_bytes as from_bytes
from comm_collectives.base.wire import is_dense as is_dense
from comm_collectives.base.wire import new_tensor as new_tensor
from comm_collectives.base.wire import num_bytes as num_bytes

from comm_collectives.alltoall import all_to_all as all_to_all
from comm_collectives.errors import CollectiveTimeoutError as CollectiveTimeoutError
from comm_collectives.errors import CommError as CommError
from comm_collectives.errors import MismatchError as MismatchError
from comm_collectives.errors import PeerFailedError as PeerFailedError
from comm_collectives.moe import Dispatched as Dispatched
from comm_collectives.moe import DispatchHandle as DispatchHandle
from comm_collectives.moe import combine as combine
from comm_collectives.moe import dispatch as dispatch
from comm_collectives.nested import broadcast_nested as broadcast_nested
from comm_collectives.p2p import SendHandle as SendHandle
from comm_collectives.p2p import isend_tensors as isend_tensors
from comm_collectives.p2p import recv_tensors as recv_tensors
from comm_collectives.reduction import all_reduce as all_reduce

__all__ = [
    "CollectiveTimeoutError",
    "CommError",
    "DispatchHandle",
    "Dispatched",
    "MismatchError",
    "PeerFailedError",
    "SendHandle",
    "all_reduce",
    "all_to_all",
    "broadcast_nested",
    "combine",
    "dispatch",
    "isend_tensors",
    "recv_tensors",
]

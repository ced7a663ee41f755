from comm_collectives.agreement import AgreementPolicy as AgreementPolicy
from comm_collectives.alltoall import all_to_all as all_to_all
from comm_collectives.broadcasting import broadcast as broadcast
from comm_collectives.callsite import call_site as call_site
from comm_collectives.deepep import DeepEpBackend as DeepEpBackend
from comm_collectives.errors import CollectiveTimeoutError as CollectiveTimeoutError
from comm_collectives.errors import CommError as CommError
from comm_collectives.errors import LostGradientWarning as LostGradientWarning
from comm_collectives.errors import MismatchError as MismatchError
from comm_collectives.errors import MutatedInputError as MutatedInputError
from comm_collectives.errors import PeerFailedError as PeerFailedError
from comm_collectives.errors import RefusedError as RefusedError
from comm_collectives.errors import RefusedTypeError as RefusedTypeError
from comm_collectives.faults import FaultSchedule as FaultSchedule
from comm_collectives.fuzzing import fuzz as fuzz
from comm_collectives.gathers import all_gather as all_gather
from comm_collectives.gathers import reduce_scatter as reduce_scatter
from comm_collectives.groups import set_agreement as set_agreement
from comm_collectives.handles import Handle as Handle
from comm_collectives.moe import Dispatched as Dispatched
from comm_collectives.moe import combine as combine
from comm_collectives.moe import dispatch as dispatch
from comm_collectives.moe import dispatch_async as dispatch_async
from comm_collectives.moe_handle import DispatchHandle as DispatchHandle
from comm_collectives.moe_options import MoeOptions as MoeOptions
from comm_collectives.nested import broadcast_nested as broadcast_nested
from comm_collectives.overlap import GradientOverlap as GradientOverlap
from comm_collectives.overlap import overlap_gradients as overlap_gradients
from comm_collectives.overlap_moe import OverlappedMoe as OverlappedMoe
from comm_collectives.p2p import SendHandle as SendHandle
from comm_collectives.p2p import expect_tensors as expect_tensors
from comm_collectives.p2p import isend_tensors as isend_tensors
from comm_collectives.p2p import recv_tensors as recv_tensors
from comm_collectives.reduction import all_reduce as all_reduce
from comm_collectives.rooted import gather as gather
from comm_collectives.rooted import scatter as scatter
from comm_collectives.send_recv import recv as recv
from comm_collectives.send_recv import send as send
from comm_collectives.shm_backend import register_backends as register_backends
from comm_collectives.simulation import simulate as simulate
from comm_collectives.watch import debug_mode as debug_mode
from comm_collectives.wire_count import count_wire_bytes as count_wire_bytes

__all__ = [
    "AgreementPolicy",
    "CollectiveTimeoutError",
    "CommError",
    "DeepEpBackend",
    "DispatchHandle",
    "Dispatched",
    "FaultSchedule",
    "GradientOverlap",
    "Handle",
    "LostGradientWarning",
    "MismatchError",
    "MoeOptions",
    "MutatedInputError",
    "OverlappedMoe",
    "PeerFailedError",
    "RefusedError",
    "RefusedTypeError",
    "SendHandle",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_nested",
    "call_site",
    "combine",
    "count_wire_bytes",
    "debug_mode",
    "dispatch",
    "dispatch_async",
    "expect_tensors",
    "fuzz",
    "gather",
    "isend_tensors",
    "overlap_gradients",
    "recv",
    "recv_tensors",
    "reduce_scatter",
    "register_backends",
    "scatter",
    "send",
    "set_agreement",
    "simulate",
]

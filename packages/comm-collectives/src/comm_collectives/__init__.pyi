from comm_collectives.call.agreement.agreement import AgreementPolicy as AgreementPolicy
from comm_collectives.call.groups.groups import set_agreement as set_agreement
from comm_collectives.call.groups.wire_count import count_wire_bytes as count_wire_bytes
from comm_collectives.call.handles.handles import Handle as Handle
from comm_collectives.call.handles.watch import debug_mode as debug_mode
from comm_collectives.call.signature.callsite import call_site as call_site
from comm_collectives.collectives.alltoall import all_to_all as all_to_all
from comm_collectives.collectives.broadcasting import broadcast as broadcast
from comm_collectives.collectives.gathers import all_gather as all_gather
from comm_collectives.collectives.gathers import reduce_scatter as reduce_scatter
from comm_collectives.collectives.overlap import GradientOverlap as GradientOverlap
from comm_collectives.collectives.overlap import overlap_gradients as overlap_gradients
from comm_collectives.collectives.reduction import all_reduce as all_reduce
from comm_collectives.collectives.rooted import gather as gather
from comm_collectives.collectives.rooted import scatter as scatter
from comm_collectives.errors import CollectiveTimeoutError as CollectiveTimeoutError
from comm_collectives.errors import CommError as CommError
from comm_collectives.errors import LostGradientWarning as LostGradientWarning
from comm_collectives.errors import MismatchError as MismatchError
from comm_collectives.errors import MutatedInputError as MutatedInputError
from comm_collectives.errors import PeerFailedError as PeerFailedError
from comm_collectives.errors import RefusedError as RefusedError
from comm_collectives.errors import RefusedTypeError as RefusedTypeError
from comm_collectives.moe.deepep.backend import DeepEpBackend as DeepEpBackend
from comm_collectives.moe.dispatch_combine import Dispatched as Dispatched
from comm_collectives.moe.dispatch_combine import combine as combine
from comm_collectives.moe.dispatch_combine import dispatch as dispatch
from comm_collectives.moe.dispatch_combine import dispatch_async as dispatch_async
from comm_collectives.moe.handle import DispatchHandle as DispatchHandle
from comm_collectives.moe.options import MoeOptions as MoeOptions
from comm_collectives.moe.overlap import OverlappedMoe as OverlappedMoe
from comm_collectives.nested.broadcast import broadcast_nested as broadcast_nested
from comm_collectives.p2p.send_recv import recv as recv
from comm_collectives.p2p.send_recv import send as send
from comm_collectives.p2p.tensors import SendHandle as SendHandle
from comm_collectives.p2p.tensors import expect_tensors as expect_tensors
from comm_collectives.p2p.tensors import isend_tensors as isend_tensors
from comm_collectives.p2p.tensors import recv_tensors as recv_tensors
from comm_collectives.shm.backend import register_backends as register_backends
from comm_collectives.simulation.faults.schedule import FaultSchedule as FaultSchedule
from comm_collectives.simulation.fuzz.fuzzing import fuzz as fuzz
from comm_collectives.simulation.run import simulate as simulate

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

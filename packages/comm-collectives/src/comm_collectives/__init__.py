"""Collectives that are right for every shape and dtype, and MoE dispatch/combine.

Importing this package imports neither torch nor anything else; each name is loaded on first use.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "AgreementPolicy": "call.agreement.agreement",
    "CollectiveTimeoutError": "errors",
    "CommError": "errors",
    "DeepEpBackend": "moe.deepep.backend",
    "DispatchHandle": "moe.handle",
    "Dispatched": "moe.dispatch_combine",
    "FaultSchedule": "simulation.faults.schedule",
    "GradientOverlap": "collectives.overlap",
    "Handle": "call.handles.handles",
    "LostGradientWarning": "errors",
    "MismatchError": "errors",
    "MoeOptions": "moe.options",
    "MutatedInputError": "errors",
    "OverlappedMoe": "moe.overlap",
    "PeerFailedError": "errors",
    "RefusedError": "errors",
    "RefusedTypeError": "errors",
    "SendHandle": "p2p.tensors",
    "all_gather": "collectives.gathers",
    "all_reduce": "collectives.reduction",
    "all_to_all": "collectives.alltoall",
    "broadcast": "collectives.broadcasting",
    "broadcast_nested": "nested.broadcast",
    "call_site": "call.signature.callsite",
    "combine": "moe.dispatch_combine",
    "count_wire_bytes": "call.groups.wire_count",
    "debug_mode": "call.handles.watch",
    "dispatch": "moe.dispatch_combine",
    "dispatch_async": "moe.dispatch_combine",
    "expect_tensors": "p2p.tensors",
    "fuzz": "simulation.fuzz.fuzzing",
    "gather": "collectives.rooted",
    "isend_tensors": "p2p.tensors",
    "overlap_gradients": "collectives.overlap",
    "recv": "p2p.send_recv",
    "recv_tensors": "p2p.tensors",
    "reduce_scatter": "collectives.gathers",
    "register_backends": "shm.backend",
    "scatter": "collectives.rooted",
    "send": "p2p.send_recv",
    "set_agreement": "call.groups.groups",
    "simulate": "simulation.run",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

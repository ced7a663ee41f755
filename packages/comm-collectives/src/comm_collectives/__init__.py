"""Collectives that are right for every shape and dtype, and MoE dispatch/combine.

Importing this package imports neither torch nor anything else; each name is loaded on first use.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "AgreementPolicy": "agreement",
    "CollectiveTimeoutError": "errors",
    "CommError": "errors",
    "DeepEpBackend": "deepep",
    "DispatchHandle": "moe_handle",
    "Dispatched": "moe",
    "FaultSchedule": "faults",
    "GradientOverlap": "overlap",
    "Handle": "handles",
    "LostGradientWarning": "errors",
    "MismatchError": "errors",
    "MoeOptions": "moe_options",
    "MutatedInputError": "errors",
    "OverlappedMoe": "overlap_moe",
    "PeerFailedError": "errors",
    "RefusedError": "errors",
    "RefusedTypeError": "errors",
    "SendHandle": "p2p",
    "all_gather": "gathers",
    "all_reduce": "reduction",
    "all_to_all": "alltoall",
    "broadcast": "broadcasting",
    "broadcast_nested": "nested",
    "call_site": "callsite",
    "combine": "moe",
    "count_wire_bytes": "wire_count",
    "debug_mode": "watch",
    "dispatch": "moe",
    "dispatch_async": "moe",
    "expect_tensors": "p2p",
    "fuzz": "fuzzing",
    "gather": "rooted",
    "isend_tensors": "p2p",
    "overlap_gradients": "overlap",
    "recv": "send_recv",
    "recv_tensors": "p2p",
    "reduce_scatter": "gathers",
    "register_backends": "shm_backend",
    "scatter": "rooted",
    "send": "send_recv",
    "set_agreement": "groups",
    "simulate": "simulation",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # so that the next use does not come here
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

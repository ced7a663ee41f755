"""Collectives that are right for every shape and dtype, and MoE dispatch/combine.

Importing this package imports neither torch nor anything else; each name is loaded on first use.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "CollectiveTimeoutError": "errors",
    "CommError": "errors",
    "DispatchHandle": "moe",
    "Dispatched": "moe",
    "MismatchError": "errors",
    "PeerFailedError": "errors",
    "SendHandle": "p2p",
    "all_reduce": "reduction",
    "all_to_all": "alltoall",
    "broadcast_nested": "nested",
    "combine": "moe",
    "dispatch": "moe",
    "isend_tensors": "p2p",
    "recv_tensors": "p2p",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

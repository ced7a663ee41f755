"""The private torch names that this package needs, in one place that an upgrade has to check.

`torch.distributed` keeps the store of the default group to itself; it tells who did not arrive.
Version counters of tensors tell whether one was changed in place. A tensor that wraps others says
so by two methods, which torch has a private test for.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "group_limit_s",
    "is_traceable_wrapper_subclass",
    "set_default_timeout",
    "shared_store",
    "version_of",
]


def shared_store() -> Store | None:
    """Return the store that `init_process_group` made; None for a `FileStore`, or less than one.

    A rank that is killed while it appends to a FileStore leaves half a record, on which every later
    call of its peers spins forever.

    Raises:
        CheckpointValueError: no process group has been initialised.
    """
    store = _get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    is_fit = not isinstance(inner, FileStore) and inner.has_extended_api()  # type: ignore[attr-defined]
    return store if is_fit else None


def group_limit_s(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the limit of a group's backend for a device in seconds, inf if it has none."""
    resolved = group or dist.distributed_c10d._get_default_group()
    options = getattr(resolved._get_backend(device), "options", None)
    limit = getattr(options, "_timeout", None)
    return float("inf") if limit is None else float(limit.total_seconds())


def set_default_timeout(timeout: timedelta) -> None:
    """Set the limit of the default group's later calls; torch before 2.13 has no public way."""
    public = getattr(dist, "set_timeout", None)
    (public or distributed_c10d._set_pg_timeout)(timeout)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or what it views, was changed in place; 0 if torch counts not."""
    return 0 if tensor.is_inference() else tensor._version

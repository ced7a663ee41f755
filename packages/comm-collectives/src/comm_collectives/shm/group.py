"""The process group of `comm_shm`, whose calls return the backend's own handles.

torch wraps what a backend written in Python returns in a handle that passes on `wait` and
`get_future` alone: it is never completed and knows no source. This group makes the same calls in
the same way, hooks, dispatcher and profiler included, and returns the handle inside.

    work = group.allreduce([x], opts)       # as torch.distributed does
    work.is_completed()
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist

from comm_collectives._torch_private import Store
from comm_collectives.shm.backend import ShmBackend

_CPU = torch.device("cpu")
_CARRIED = """
allreduce allreduce_coalesced broadcast reduce barrier allgather allgather_coalesced
all_gather_single all_gather_single_coalesced gather scatter reduce_scatter reduce_scatter_single
reduce_scatter_single_coalesced all_to_all_single alltoall send recv recv_anysource
"""


@final
class ShmGroup(dist.ProcessGroup):
    """A process group for tensors of the CPU, made of one `ShmBackend`."""

    def __init__(self, store: Store, backend: ShmBackend) -> None:
        super().__init__(store, backend.rank(), backend.size())
        self._backend = backend
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.CUSTOM, backend)

    def getBackendName(self) -> str:
        """Return the name of the backend; torch asks."""
        return self._backend.getBackendName()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """As torch's: the same backend for the ranks of a part, None for the others. Collective."""
        if self.rank() not in new_ranks:
            return None
        part = super().split_group(new_ranks, timeout, opts, group_name, group_desc, device_types)
        made = cast(dist.ProcessGroup, part)
        group = ShmGroup(made.get_group_store(), cast(ShmBackend, made._get_backend(_CPU)))
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        return group


def _with_own_handle(name: str) -> Callable[..., Any]:
    """Return a method that calls torch's of that name and returns the handle inside torch's."""
    plain = getattr(dist.ProcessGroup, name)

    def call(self: ShmGroup, *args: Any, **options: Any) -> Any:
        return self._backend.unwrapped(plain(self, *args, **options))

    # By this name torch sees that the method of the base is called by the one that overrides it.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


for _name in _CARRIED.split():
    if hasattr(dist.ProcessGroup, _name):  # torch 2.11 lacks some, and makes no such group
        setattr(ShmGroup, _name, _with_own_handle(_name))

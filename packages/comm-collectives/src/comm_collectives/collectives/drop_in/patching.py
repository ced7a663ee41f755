"""Torch's own functions replaced by those of this room, for code that calls `torch.distributed`.

What torch builds of them (`all_gather_object`, `broadcast_object_list`, `batch_isend_irecv`, ...)
then runs on them as well. This package, and what runs under it, keeps torch's own, so that nothing
recurses.

    with patched_torch():
        train()                                # calls torch.distributed.all_reduce(...)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from comm_collectives._torch_private import graph_break, is_coalescing, wants_raw_torch
from comm_collectives.call.signature import site_in_torch, use_site
from comm_collectives.collectives.drop_in import lists, reductions, torch_order, transfers

_MODULES: tuple[Any, ...] = (dist, distributed_c10d)
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    torch_order.all_to_all_single,
    torch_order.all_gather_into_tensor,
    torch_order.broadcast,
    torch_order.barrier,
    reductions.all_reduce,
    reductions.all_reduce_coalesced,
    reductions.reduce,
    reductions.reduce_scatter,
    reductions.reduce_scatter_tensor,
    lists.all_to_all,
    lists.all_gather,
    lists.all_gather_coalesced,
    lists.gather,
    lists.scatter,
    transfers.isend,
    transfers.irecv,
    transfers.send,
    transfers.recv,
)
_OURS = {fn.__name__: fn for fn in _FUNCTIONS}
_OTHER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}


@final
class _Patches:
    """What stands in torch's place, and how many times it was asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._torchs: list[tuple[Any, str, Any]] = []  # module, name, torch's function
        self.has_served = False

    def add(self) -> None:
        """Replace torch's functions, if they are not yet."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._replace()

    def drop(self) -> None:
        """Put torch's functions back, if nobody needs others."""
        with self._lock:
            self._depth -= 1
            while self._torchs and not self._depth:
                # gate: setattr - the one purpose of this module
                setattr(*self._torchs.pop())

    def serve(self) -> None:
        """Note that a call came to this room."""
        self.has_served = True

    def _replace(self) -> None:
        for name in (*_OURS, *_OTHER_NAMES):
            original = getattr(distributed_c10d, name, None)
            if original is None:  # newer torch has more names
                continue
            stand_in = _standing_in(_OURS[_OTHER_NAMES.get(name, name)], original)
            for module in _MODULES:
                if getattr(module, name, None) is original:
                    self._torchs.append((module, name, original))
                    # gate: setattr - the one purpose of this module
                    setattr(module, name, stand_in)


_PATCHES = _Patches()


@contextmanager
def patched_torch() -> Iterator[Callable[[], bool]]:
    """Put this room's functions in place of torch's, in the whole process, until the end.

    Not collective, but all ranks of a group have to use the same functions: enter it on all of
    them. May be nested. Functions that code took out of torch before (`from torch.distributed
    import all_reduce`), methods of a ProcessGroup (as of DistributedDataParallel's reducer),
    `monitored_barrier` and functional collectives stay torch's, and so do calls of a group whose
    calls torch gathers: in its `_coalescing_manager`, which then waits for all of them, and in
    `batch_isend_irecv` on devices. `P2POp` takes `isend` and `irecv` as they are called inside.
    Calls that torch's own programs make (pipelines, `join`) are not compared by the user's line.

    Yields:
        What says whether this room's functions have served any call of this process.
    """
    _PATCHES.add()
    try:
        yield lambda: _PATCHES.has_served
    finally:
        _PATCHES.drop()


def _standing_in(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @graph_break
    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        is_torchs = wants_raw_torch() or is_coalescing(original, *args, **kwargs)
        if not is_torchs:
            _PATCHES.serve()
        site = None if is_torchs else site_in_torch()
        with nullcontext() if site is None else use_site(site):
            return (original if is_torchs else ours)(*args, **kwargs)

    return stand_in

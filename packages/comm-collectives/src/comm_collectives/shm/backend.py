"""The backend `comm_shm`: torch's collectives through shared memory, for ranks of one host.

It is made of gloo and of streams in shared memory. Whether the ranks share memory is found out by
trying, once per group; if they do not, or if a collective is not one of its own, gloo does the
work: on all ranks alike, and with gloo's own limits.

    register_backends()
    dist.init_process_group("comm_shm")                  # or "cpu:comm_shm,cuda:nccl"
    group = dist.new_group(backend="comm_shm")

What holds:

- Memory: 1 MiB of /dev/shm for a group of two, at most 8 MiB for up to 45 ranks, whatever is sent.
- Calls of one group run in order; asynchronous ones go on while nobody waits for them.
- Ranks that make different calls, or of different size or dtype, all raise `MismatchError`, and the
  group is usable afterwards. So it is when `Work.wait(timeout)` gives up: the call goes on.
- A call in which ranks are missing for longer than the group's limit raises on every rank, naming
  who did not arrive; a dead peer raises within a second.
- Handles are whole in groups of this backend alone. In groups of several backends
  ("cpu:comm_shm,cuda:nccl") torch wraps those of Python backends: `is_completed()` stays False and
  a receive from any rank has no source there; `wait()` and `get_future()` work.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives._torch_private import Backend, PrefixStore, Store
from comm_collectives.base import bytes_of
from comm_collectives.base.streams import ShmStreams
from comm_collectives.call.handles import Handle, launch
from comm_collectives.collectives.drop_in import CallWork
from comm_collectives.errors import CommValueError
from comm_collectives.shm import operations
from comm_collectives.shm.arguments import Tensors
from comm_collectives.shm.calls import Calls, Operation
from comm_collectives.shm.operations import Gloo, Options, Place

BACKEND_NAME = "comm_shm"
_MESSAGE_BYTES = 256
_DONE = Handle.finished("comm_shm", None)
# The collectives by torch's names: what gloo calls them, and what makes them here.
_COLLECTIVES: dict[str, tuple[str, Callable[..., Operation] | None]] = {
    "allreduce": ("allreduce", operations.build_all_reduce),
    "broadcast": ("broadcast", operations.build_broadcast),
    "reduce": ("reduce", operations.build_reduce),
    "allgather": ("allgather", operations.build_all_gather),
    "all_gather_single": ("_allgather_base", operations.build_all_gather_single),
    "gather": ("gather", operations.build_gather),
    "scatter": ("scatter", operations.build_scatter),
    "reduce_scatter": ("reduce_scatter", operations.build_reduce_scatter),
    "reduce_scatter_single": ("_reduce_scatter_base", operations.build_reduce_scatter_single),
    "all_to_all_single": ("alltoall_base", operations.build_all_to_all_single),
    "alltoall": ("alltoall", operations.build_all_to_all),
    "barrier": ("barrier", operations.build_barrier),
    "allreduce_coalesced": ("allreduce_coalesced", None),
    "allgather_coalesced": ("allgather_coalesced", None),
    "all_gather_single_coalesced": ("all_gather_single_coalesced", None),
    "reduce_scatter_single_coalesced": ("reduce_scatter_single_coalesced", None),
}
# Older versions of torch know three of them by gloo's names.
_OLDER = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")


@final
class ShmBackend(Backend):
    """The CPU collectives of one group. Made by torch; collective."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        gloo: Gloo = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        self._gloo = gloo
        self._place = Place(rank, tuple(ranks), gloo)
        self._calls: Calls | None = None
        self._last = threading.local()
        if len(ranks) > 1:
            streams = ShmStreams.open(rank, len(ranks), self._all_gather_bytes)
            if streams is not None:
                self._calls = Calls(streams, ranks)
                weakref.finalize(self, self._calls.close)

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of the group were found to share memory."""
        return self._calls is not None

    @property
    def options(self) -> Any:
        """Gloo's options: the group's limit, above all."""
        return self._gloo.options

    @property
    def supports_splitting(self) -> bool:
        """`split_group` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Calls are made one by one."""
        return False

    # Torch would ask these of the class in Python again, and again.
    supports_shrinking = supports_reconfigure = supports_window = supports_coalescing
    _supports_time_estimate = supports_coalescing

    def getBackendName(self) -> str:
        """Return the name of the backend; torch asks."""
        return BACKEND_NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the group's limit."""
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        """End the use of shared memory and of gloo."""
        if self._calls is not None:
            self._calls.close()
        self._gloo.shutdown()

    abort = shutdown

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> "ShmBackend":
        """Make the backend of some ranks of this one. Collective for them.

        Raises:
            CommValueError: this rank is not one of them.
        """
        if self._place.rank not in ranks:
            # Torch takes no None from Python here.
            raise CommValueError(
                f"rank {self._place.rank} of the group is in no part; in a group of several "
                "backends split_ranks must name every rank: put the others into one more part"
            )
        names = [self._place.ranks[rank] for rank in ranks]
        # The backends of other devices use the same store.
        own = PrefixStore(BACKEND_NAME, store.clone())
        return ShmBackend(own, list(ranks).index(self._place.rank), names, opts._timeout)

    def unwrapped(self, handle: dist.Work) -> dist.Work:
        """Return the handle of this thread's last call, of which torch has made `handle`."""
        last, self._last.work = getattr(self._last, "work", None), None
        return handle if last is None else last

    def monitored_barrier(self, opts: Options, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks and name the absent, over gloo."""
        self._gloo.monitored_barrier(opts.timeout, wait_all_ranks)

    def send(self, tensors: Tensors, dst: int, tag: int) -> Any:
        """Send, over gloo."""
        return self._own(self._gloo.send(tensors, dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> Any:
        """Receive, over gloo."""
        return self._own(self._gloo.recv(tensors, src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive from anybody, over gloo."""
        return self._own(self._gloo.recv_anysource(tensors, tag))

    def carry_out(self, name: str, arguments: Sequence[Any], opts: Options) -> Any:
        """Make one of the collectives; return its handle. Collective."""
        plain, build = _COLLECTIVES[name]
        calls = self._calls
        if calls is None:
            return self._own(getattr(self._gloo, plain)(*arguments, opts))
        try:
            if build is None:
                start = getattr(self._gloo, plain)
                operation = operations.left_to_gloo(name, start, arguments, opts)
            else:
                operation = build(self._place, *arguments, opts)
        except (TypeError, ValueError) as error:
            operation = operations.refused(error)
        limit = opts.timeout
        if limit <= timedelta(0):
            limit = self._gloo.options._timeout
        operation.limit_s = limit.total_seconds()
        run = partial(calls.carry_out, operation)
        handle = launch(calls, operation.head.operation, run, inputs=(), async_op=opts.asyncOp)
        return self._own(CallWork(handle or _DONE, operation.results))

    def _own(self, work: dist.Work) -> dist.Work:
        self._last.work = work
        return work

    def _all_gather_bytes(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in self._place.ranks]
        self._gloo.allgather(gathered, own).wait()
        return [bytes_of(told) for told in gathered]


def _method(name: str) -> Callable[..., Any]:
    """Return the method in which torch makes the collective of that name."""

    def call(self: ShmBackend, *arguments: Any) -> Any:
        *given, opts = arguments
        return self.carry_out(name, given, opts)

    return call


for _name, (_older, _) in _COLLECTIVES.items():
    setattr(ShmBackend, _name, _method(_name))
    if _name in _OLDER:
        setattr(ShmBackend, _older, _method(_name))

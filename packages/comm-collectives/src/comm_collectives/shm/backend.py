"""The backend `comm_shm`: torch's collectives through shared memory, for ranks of one host.

It is made of gloo and a region of shared memory. Whether the ranks share memory is found out by
trying, once per group; if they do not, if a collective is not one of its own, or after a call has
failed half way, gloo does the work: on all ranks alike, and with gloo's own limits.

    comm_collectives.register_backends()
    dist.init_process_group("comm_shm")                  # or "cpu:comm_shm,cuda:nccl"
    group = dist.new_group(backend="comm_shm")

What holds:

- Memory: 4 MiB of /dev/shm for a group of two, about 16 MiB for up to 128 ranks, whatever is sent.
- Calls of one group run in order; asynchronous ones go on while nobody waits for them.
- Ranks that make different calls, or of different size or dtype, all raise `MismatchError`, and the
  group is usable afterwards. So it is when `Work.wait(timeout)` gives up: the call goes on.
- A call that takes longer than the group's limit raises on every rank that waits, naming who did
  not arrive; a dead peer raises within a second. Later calls of the group go through gloo.
- Handles are whole in groups of this backend alone. In groups of several backends
  ("cpu:comm_shm,cuda:nccl") torch wraps those of Python backends: `is_completed()` stays False and
  a receive from any rank has no source there; `wait()` and `get_future()` work.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from comm_collectives._torch_private import Backend, PrefixStore, Store
from comm_collectives.base import bytes_of
from comm_collectives.errors import CommValueError, RefusedError
from comm_collectives.shm import operations
from comm_collectives.shm.arguments import Tensors
from comm_collectives.shm.channel import Channel
from comm_collectives.shm.heads import Head
from comm_collectives.shm.operations import Gloo, Options, Place
from comm_collectives.shm.queue import Operation, Queue, ShmWork

BACKEND_NAME = "comm_shm"
_MESSAGE_BYTES = 256


@final
class ShmBackend(Backend):
    """The CPU collectives of one group. Made by torch; collective."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        gloo: Gloo = dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
        self._gloo = gloo
        self._place = Place(rank, tuple(ranks), gloo)
        self._queue: Queue | None = None
        self._last = threading.local()
        if len(ranks) > 1:
            channel = Channel.open(rank, ranks, self._all_gather_bytes)
            if channel is not None:
                self._queue = Queue(channel)
                weakref.finalize(self, self._queue.close)

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks of the group were found to share memory."""
        return self._queue is not None

    @property
    def options(self) -> Any:
        """Gloo's options: the group's limit, above all."""
        return self._gloo.options

    def getBackendName(self) -> str:
        """Return the name of the backend; torch asks."""
        return BACKEND_NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the group's limit."""
        self._gloo.set_timeout(timeout)

    def shutdown(self) -> None:
        """End the use of shared memory and of gloo."""
        if self._queue is not None:
            self._queue.close()
        self._gloo.shutdown()

    abort = shutdown

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

    def allreduce(self, tensors: Tensors, opts: Options) -> Any:
        """Reduce in place."""
        return self._carry_out(operations.build_all_reduce, self._gloo.allreduce, opts, tensors)

    def broadcast(self, tensors: Tensors, opts: Options) -> Any:
        """Broadcast in place."""
        return self._carry_out(operations.build_broadcast, self._gloo.broadcast, opts, tensors)

    def reduce(self, tensors: Tensors, opts: Options) -> Any:
        """Reduce to one rank."""
        return self._carry_out(operations.build_reduce, self._gloo.reduce, opts, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> Any:
        """Gather into lists."""
        plain = self._gloo.allgather
        return self._carry_out(operations.build_all_gather, plain, opts, outputs, inputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Options) -> Any:
        """Gather into one tensor."""
        plain = self._gloo._allgather_base
        return self._carry_out(operations.build_all_gather_single, plain, opts, output, source)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options) -> Any:
        """Gather into a list on one rank."""
        return self._carry_out(operations.build_gather, self._gloo.gather, opts, outputs, inputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> Any:
        """Scatter a list of one rank."""
        return self._carry_out(operations.build_scatter, self._gloo.scatter, opts, outputs, inputs)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Options) -> Any:
        """Reduce a list, one tensor to each rank."""
        plain = self._gloo.reduce_scatter
        return self._carry_out(operations.build_reduce_scatter, plain, opts, outputs, inputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Options
    ) -> Any:
        """Reduce one tensor, a part of it to each rank."""
        plain = self._gloo._reduce_scatter_base
        return self._carry_out(operations.build_reduce_scatter_single, plain, opts, output, source)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options,
    ) -> Any:
        """Exchange rows of one tensor."""

        def plain(*_: object) -> Any:
            return self._gloo.alltoall_base(
                output, source, list(output_splits), list(input_splits), opts
            )

        splits = output_splits, input_splits
        build = operations.build_all_to_all_single
        return self._carry_out(build, plain, opts, output, source, splits)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Any:
        """Exchange the tensors of a list."""
        return self._carry_out(
            operations.build_all_to_all, self._gloo.alltoall, opts, outputs, inputs
        )

    def barrier(self, opts: Options) -> Any:
        """Wait for all ranks."""
        return self._carry_out(operations.build_barrier, self._gloo.barrier, opts)

    # Older versions of torch know three of them by other names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def allreduce_coalesced(self, tensors: Tensors, opts: Options) -> Any:
        """Reduce several tensors, over gloo."""
        return self._leave_to_gloo("allreduce_coalesced", tensors, opts, tensors)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options
    ) -> Any:
        """Gather several tensors, over gloo."""
        return self._leave_to_gloo("allgather_coalesced", inputs, opts, outputs, inputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> Any:
        """Gather several tensors, over gloo."""
        return self._leave_to_gloo("all_gather_single_coalesced", inputs, opts, outputs, inputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Options
    ) -> Any:
        """Reduce several tensors, over gloo."""
        return self._leave_to_gloo("reduce_scatter_single_coalesced", inputs, opts, outputs, inputs)

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

    def _carry_out(
        self,
        build: Callable[..., Operation],
        plain: Callable[..., Any],
        opts: Options,
        *arguments: object,
    ) -> Any:
        queue = self._queue
        if queue is None:
            return self._own(plain(*arguments, opts))
        try:
            operation = build(self._place, *arguments, opts)
        except RefusedError as error:
            operation = operations.refused(error)
        return self._run(queue, operation, opts)

    def _leave_to_gloo(self, name: str, tensors: Tensors, opts: Options, *arguments: object) -> Any:
        plain = getattr(self._gloo, name)
        if self._queue is None:
            return self._own(plain(*arguments, opts))
        head = Head(name, tensors[0].dtype, "", sum(tensor.nbytes for tensor in tensors))
        operation = operations.by_gloo(self._place, head, lambda: plain(*arguments, opts))
        return self._run(self._queue, operation, opts)

    def _run(self, queue: Queue, operation: Operation, opts: Options) -> Any:
        limit = opts.timeout
        if limit <= timedelta(0):
            limit = self._gloo.options._timeout
        operation.limit_s = limit.total_seconds()
        task = queue.submit(operation) if opts.asyncOp else queue.run(operation)
        return self._own(ShmWork(queue, task))

    def _own(self, work: dist.Work) -> dist.Work:
        self._last.work = work
        return work

    def _all_gather_bytes(self, message: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(message.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(own) for _ in self._place.ranks]
        self._gloo.allgather(gathered, own).wait()
        return [bytes_of(told) for told in gathered]

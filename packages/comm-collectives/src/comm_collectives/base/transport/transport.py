"""How bytes of a device move between the ranks of a group, and what its backend knows.

Operations start at once and return something to wait for. Data moves as flat uint8 tensors, so no
dtype is refused; only `all_reduce` does arithmetic and sees the dtype.

    transport = TorchTransport(group)
    pending = transport.exchange(target, source, received_bytes, sent_bytes)
    pending.wait(timedelta(seconds=30))
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, final
from weakref import ref

import torch
import torch.distributed as dist

from comm_collectives._torch_private import Store, abort_devices, group_timeout_s, raw_torch
from comm_collectives.base.transport.clock import SYSTEM_CLOCK, Clock
from comm_collectives.errors import CollectiveTimeoutError, CommError, PeerFailedError

_PROBE_TAG = 0x6D6F65
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Gloo closes a connection whose transfer ran into its limit; what comes later fails with this.
_CLOSED_WORDS = ("pair closure",)
_TIMEOUT_WORDS = ("timed out", "timeout")
_PEER_WORDS = ("connection closed", "connection reset", "broken pipe", "connection refused", "peer")


class Pending(Protocol):
    """An operation under way, in the terms of `torch.distributed.Work`."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait for its end; RuntimeError if it failed or the limit passed."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""


class Transport(ABC):
    """The operations of a group. Ranks are numbers inside the group, and tensors flat uint8.

    Attributes:
        limit_s: how long an operation may take when no limit is given.
        clock: the time by which limits pass.
        has_one_order: whether a device queues calls and transfers of all pairs in one order, as
            NCCL does in a group that is bound to a device.
    """

    limit_s: float
    clock: Clock = SYSTEM_CLOCK
    has_one_order = False

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The group, whose backend moves the data."""

    def place(self, kind: str) -> torch.device:
        """Return where data travels that travels on such a device: of every thread the same."""
        return torch.device(kind)

    def store(self) -> Store | None:
        """Return where ranks leave reports of failures; None means the default group's store."""
        return None

    def abort(self) -> None:
        """Let what the group's device waits for come to an end, for good: its data is garbage."""
        abort_devices(self.group)

    @raw_torch
    def exchange(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        received_bytes: Sequence[int],
        sent_bytes: Sequence[int],
    ) -> Pending | None:
        """All-to-all of bytes between flat uint8 tensors; pieces lie by rank."""
        return dist.all_to_all_single(
            target, source, list(received_bytes), list(sent_bytes), group=self.group, async_op=True
        )

    @raw_torch
    def all_gather(self, target: torch.Tensor, source: torch.Tensor) -> Pending | None:
        """Gather equally many bytes of every rank, by rank."""
        return dist.all_gather_into_tensor(target, source, group=self.group, async_op=True)

    @raw_torch
    def broadcast(self, flat: torch.Tensor, root: int) -> Pending | None:
        """Broadcast in place."""
        return dist.broadcast(flat, group=self.group, group_src=root, async_op=True)

    @raw_torch
    def all_reduce(self, flat: torch.Tensor, op: str) -> Pending | None:
        """Reduce in place; op is one of sum, min, max, product, for the dtypes that it has."""
        return dist.all_reduce(flat, op=_OPS[op], group=self.group, async_op=True)

    @raw_torch
    def send(self, flat: torch.Tensor, dst: int) -> Pending | None:
        """Start to send to one rank."""
        return dist.isend(flat, group=self.group, group_dst=dst)

    @raw_torch
    def has_lost(self, peer: int) -> bool:
        """Whether gloo knows that a rank has ended: it connected all when it made the group.

        A live one is told of a byte under a tag that nobody receives.
        """
        probe = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            dist.isend(probe, group=self.group, group_dst=peer, tag=_PROBE_TAG)
        except RuntimeError as error:
            # A connection that gloo gave up, since a raw transfer was late, says nothing.
            return not any(word in str(error) for word in _CLOSED_WORDS)
        return False

    @raw_torch
    def recv(self, flat: torch.Tensor, src: int) -> Pending | None:
        """Start to receive from one rank."""
        return dist.irecv(flat, group=self.group, group_src=src)


@final
class TorchTransport(Transport):
    """The operations of a `torch.distributed` process group, of any backend.

    `moves_device` says that its backend moves data of a device itself: of this thread's, which
    threads of this package would take for the first one.
    """

    def __init__(self, group: dist.ProcessGroup, *, moves_device: bool = False) -> None:
        # Weak, since what is known of a group must not outlive it.
        self._ref = ref(group)
        self.limit_s = group_timeout_s(group)
        self.has_one_order = group.bound_device_id is not None
        self._device = group.bound_device_id
        if self._device is None and moves_device and torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            kind = "cpu" if accelerator is None else accelerator.type
            self._device = torch.device(kind, torch.accelerator.current_device_index())

    def place(self, kind: str) -> torch.device:
        """See Transport."""
        if self._device is not None and self._device.type == kind:
            return self._device
        return torch.device(kind)

    @property
    def group(self) -> dist.ProcessGroup:
        """See Transport."""
        group = self._ref()
        if group is None:
            raise RuntimeError("the process group has been destroyed")
        return group


def wait_for(work: Pending, timeout_s: float | None) -> None:
    """Wait for a transfer; None waits as long as the group allows."""
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


def classify(error: RuntimeError, timeout_s: float | None) -> tuple[type[CommError], str]:
    """Tell a passed limit, a lost peer and a refused operation apart, by the backend's text."""
    text = str(error).lower()
    if any(word in text for word in _CLOSED_WORDS):
        return PeerFailedError, "has no connection to a peer since an earlier call timed out"
    if any(word in text for word in _TIMEOUT_WORDS):
        limit = "the group's limit" if timeout_s is None else f"{timeout_s:g} s"
        return CollectiveTimeoutError, f"timed out after {limit}"
    if any(word in text for word in _PEER_WORDS):
        return PeerFailedError, "lost a peer"
    return CommError, "failed"

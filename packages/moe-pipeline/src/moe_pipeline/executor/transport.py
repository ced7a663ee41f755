"""Over which process groups the messages of a schedule travel, refused where they do not suit it.

transport = transport_of(schedule, rank, (forward_group, backward_group), options)
transport.channel(edge).send(packed, limit_s)
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives import isend_tensors, recv_tensors
from comm_collectives.p2p import SendHandle
from moe_pipeline.errors import MoEValueError
from moe_pipeline.executor.device_transfers import check_order, device_kinds
from moe_pipeline.executor.execution_plan import Edge
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.schedules.table import Schedule

_LATEST_S = 10.0  # before the limit of a device, at most
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Channel:
    """A peer and a group over which it is reached; edges of both directions may share it."""

    peer: int
    group: ProcessGroup

    def send(self, packed: list[Tensor], limit_s: float | None) -> SendHandle:
        """Start to send a message."""
        return isend_tensors(packed, dst=self.peer, group=self.group, timeout_s=limit_s)

    def receive(self, limit_s: float | None) -> list[Tensor]:
        """Receive the next message, where it travelled."""
        return recv_tensors(src=self.peer, group=self.group, timeout_s=limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Over which groups messages travel, where they arrive, and how long that may take."""

    forward: ProcessGroup
    backward: ProcessGroup
    device: torch.device | None
    timeout_s: float | None
    forward_apart: frozenset[str] = frozenset()  # by `device_kinds`
    backward_apart: frozenset[str] = frozenset()
    # Groups were made with a `device_id`. Others make the communicator of a batch at its first
    # call, for which torch wants all ranks.
    is_bound: bool = False

    def apart(self, edge: Edge) -> frozenset[str]:
        """The types of device whose tensors the backend of an edge moves itself."""
        return self.forward_apart if edge.forward else self.backward_apart

    @property
    def grace_s(self) -> float:
        """How long a rank that fails tells its peers why, and hears them out."""
        limit_s = self.timeout_s or _GRACE_S
        is_on_devices = self.forward_apart or self.backward_apart
        return min(_GRACE_S, limit_s / 4 if is_on_devices else limit_s)

    def channel(self, edge: Edge) -> Channel:
        """The peer and group of an edge."""
        return Channel(edge.peer, self.forward if edge.forward else self.backward)


def transport_of(
    schedule: Schedule,
    rank: int,
    groups: tuple[ProcessGroup | None, ProcessGroup | None],
    options: ExecutorOptions,
) -> Transport:
    """How messages travel on a forward and a backward group that suit the schedule.

    Args:
        groups: None forwards: the default group; None backwards: the forward group.

    Raises:
        ScheduleError: transfers of the groups' order would never end.
        ValueError: a group has not the schedule's ranks, in order.
    """
    forward = _group("forward_group", groups[0], len(schedule.ranks), rank)
    backward = forward
    if groups[1] is not None:
        backward = _group("backward_group", groups[1], len(schedule.ranks), rank)
    on_devices = device_kinds(forward) | device_kinds(backward)
    found = Transport(
        forward=forward,
        backward=backward,
        device=None if options.device is None else torch.device(options.device),
        timeout_s=_host_limit_s(options.timeout_s) if on_devices else options.timeout_s,
        forward_apart=device_kinds(forward),
        backward_apart=device_kinds(backward),
        is_bound=any(group.bound_device_id is not None for group in (forward, backward)),
    )
    check_order(
        schedule,
        kinds=on_devices,
        has_two=backward is not forward,
        is_bound=found.is_bound,
    )
    return found


def _host_limit_s(limit_s: float | None) -> float | None:
    """How long a host waits, so that what it finds is told before the limit ends a device's wait.

    At the limit of its group a rank whose device waits is killed by torch's watchdog.
    """
    return None if limit_s is None else limit_s - min(_LATEST_S, limit_s / 4)


def _group(name: str, group: ProcessGroup | None, num_ranks: int, rank: int) -> ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise MoEValueError(f"{name}=None is the default group, which does not exist; give one")
    size, at = dist.get_world_size(found), dist.get_rank(found)
    if size != num_ranks or at != rank:
        raise MoEValueError(
            f"{name} has {size} ranks and this is rank {at} of it; the schedule has {num_ranks} "
            f"ranks and rank={rank}; give its ranks, in order"
        )
    return found

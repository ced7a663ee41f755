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
    found = Transport(
        forward=forward,
        backward=backward,
        device=None if options.device is None else torch.device(options.device),
        timeout_s=options.timeout_s,
        forward_apart=device_kinds(forward),
        backward_apart=device_kinds(backward),
        is_bound=any(group.bound_device_id is not None for group in (forward, backward)),
    )
    check_order(
        schedule,
        kinds=found.forward_apart | found.backward_apart,
        has_two=backward is not forward,
        is_bound=found.is_bound,
    )
    return found


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

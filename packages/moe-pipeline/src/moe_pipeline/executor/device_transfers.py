"""Tensors that a device moves itself (NCCL), beside the messages that announce them.

The message of a stage travels over the host; its header says dtype and shape of each tensor that
comes apart. So the host reads no memory of the device and waits for nothing on it: a send is queued
behind what the current stream has done, a receive on a stream of its own, where it waits for no
computation, and the current stream waits for a receive just before its first use. Receives of what
is expected (`slots.py`) are queued before the message has come.

Invariant: transfers are queued where the schedule lists them, sends and receives alike, which is
the order that `check(edges="pair_fifo" or "group_fifo")` has proved. A send and a receive that both
ends list next to each other are queued as one, so that neither direction waits for the other.

    apart = device_kinds(group)                              # frozenset({"cuda"})
    moves = DeviceMoves(None, find_swaps(plan, rank, has_two=False))
    moves.send(action, DeviceSend(handle, tensors), peer, group)
    moves.receive(action, announced, peer, group)
    tensors = moves.take(action)
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from comm_collectives.p2p import Pending, SendHandle, launch_transfers
from moe_pipeline._torch_private import backend_by_device
from moe_pipeline.errors import ScheduleError
from moe_pipeline.executor.execution_plan import SENDS, ExecutionPlan, other_end
from moe_pipeline.executor.stage_message import Announced
from moe_pipeline.schedules.table import Action, Schedule, check

# Backends that move everything by way of the host, as comm_collectives does without their help.
_ON_HOST = frozenset({"gloo", "mpi", "comm_shm"})


def device_kinds(group: ProcessGroup) -> frozenset[str]:
    """The types of device whose tensors the group's own backends move."""
    found = backend_by_device(group)
    return frozenset(kind for kind, backend in found.items() if backend not in _ON_HOST)


def check_order(
    schedule: Schedule, *, kinds: frozenset[str], has_two: bool, is_bound: bool
) -> None:
    """Refuse a schedule that groups with kinds of `device_kinds` would never end.

    Args:
        schedule: any that `check` accepts.
        kinds: of both groups.
        has_two: whether gradients have a group of their own.
        is_bound: whether a group was made with a `device_id`, so that all its transfers queue.

    Raises:
        ScheduleError: says which transfer waits for ever.
    """
    if not kinds:
        return
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ScheduleError(
            f"schedule {schedule.name} can hang under CUDA_DEVICE_MAX_CONNECTIONS=1, where a "
            "receive that waits holds up all that its device is given; leave the variable out, or "
            "set it to 2 or more"
        )
    communicators = 2 if has_two else 1
    edges: Literal["pair_fifo", "group_fifo"] = "group_fifo" if is_bound else "pair_fifo"
    problems = check(schedule, edges=edges, communicators=communicators)
    if problems:
        raise ScheduleError(
            f"schedule {schedule.name} would not end on {communicators} process group"
            f"{'s' * has_two} that transfer in order: {problems[0]}; let add_transfers place its "
            "sends and receives" + ("" if has_two else ", or give a backward_group")
        )


def find_swaps(plan: ExecutionPlan, rank: int, *, has_two: bool) -> dict[Action, Action]:
    """Of each transfer of a rank that is queued together with another one, that other one.

    A send and a receive of one peer on one communicator, which both ends list one after the other
    in the same order: queued alone, the second would not begin before the first has ended. Both
    ends find the same pairs.

    Args:
        has_two: whether gradients have a communicator of their own.
    """
    follower = {a: b for row in plan.schedule.ranks for a, b in pairwise(row)}
    found: dict[Action, Action] = {}
    for first, second in pairwise(plan.schedule.ranks[rank]):
        if first in found or not {first, second} <= plan.edges.keys():
            continue
        ours, other = plan.edges[first], plan.edges[second]
        meet = ours.peer == other.peer and (first.kind in SENDS) != (second.kind in SENDS)
        share = not has_two or ours.forward == other.forward
        if meet and share and follower.get(other_end(first)) == other_end(second):
            found |= {first: second, second: first}
    return found


@final
class DeviceSend:
    """A message under way, with the tensors that travel apart from it."""

    def __init__(self, handle: SendHandle, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._handle = handle
        self._works: list[Pending] | None = None

    def started(self, works: list[Pending]) -> None:
        """Take note of what moves the tensors."""
        self._works = works

    def wait(self) -> None:
        """Wait for the message, and let the current stream wait for the tensors."""
        self._handle.wait()
        for work in self._works or ():
            work.wait()  # without a limit, which would stop the host
        self._works, self.tensors = [], ()

    def is_done(self) -> bool:
        """Whether all of it has ended; stops nothing."""
        if self._works is None or not self._handle.is_done():
            return False
        return all(work.is_completed() for work in self._works)


# Dense tensors that come, with what moves them.
_Coming = tuple[list[Tensor], list[Pending]]


@final
class DeviceMoves:
    """Has a device move the tensors of one rank's transfers, on `device` or those of the group.

    Args:
        swaps: by `find_swaps`; their first half waits for the second, which comes next.
    """

    def __init__(self, device: torch.device | None, swaps: Mapping[Action, Action]) -> None:
        self._device, self._swaps = device, swaps
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._coming: dict[Action, _Coming] = {}
        self._sending: DeviceSend | None = None  # of a swap whose receive comes next
        self._announced: Sequence[Announced] | None = None  # of a swap whose send comes next

    def begin(self) -> None:
        """Forget what a step left."""
        self._coming.clear()
        self._sending = self._announced = None

    def send(self, action: Action, sending: DeviceSend, peer: int, group: ProcessGroup) -> None:
        """Queue the tensors of a message, behind what the current stream has done."""
        if action not in self._swaps:
            tensors = sending.tensors

            def start() -> list[Pending | None]:
                return [dist.isend(_bytes(t), group=group, group_dst=peer) for t in tensors]

            sending.started(launch_transfers(start, "send to", peer, group))
        elif self._announced is None:
            self._sending = sending
        else:
            announced, self._announced = self._announced, None
            self._coming[self._swaps[action]] = self._swap(sending, announced, peer, group)

    def receive(
        self, action: Action, announced: Sequence[Announced], peer: int, group: ProcessGroup
    ) -> None:
        """Queue the receives of what a message announces."""
        if action not in self._swaps:
            self._coming[action] = self._receive(announced, peer, group)
        elif self._sending is None:
            self._announced = announced
        else:
            sending, self._sending = self._sending, None
            self._coming[action] = self._swap(sending, announced, peer, group)

    def take(self, action: Action) -> list[Tensor]:
        """What came: the current stream waits for it, and its memory is kept until that is done."""
        tensors, works = self._coming.pop(action)
        for work in works:
            work.wait()
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensors

    def filling(self, slot: Sequence[Announced]) -> list[Tensor]:
        """Anything, of the shapes that a receiver expects."""
        return [self._empty(one) for one in slot]

    def placed(self, announced: Sequence[Announced], brought: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that came over the host, where they belong."""
        tensors = []
        for one, tensor in zip(announced, brought, strict=True):
            tensors.append(tensor.to(self._place(one)))
        return tensors

    def _receive(self, announced: Sequence[Announced], peer: int, group: ProcessGroup) -> _Coming:
        """On a stream of their own, where they wait for no computation."""
        tensors: list[Tensor] = []

        def start() -> list[Pending | None]:
            works: list[Pending | None] = []
            for one in announced:
                with self._beside(self._place(one)):
                    tensors.append(self._empty(one))
                    works.append(dist.irecv(_bytes(tensors[-1]), group=group, group_src=peer))
            return works

        return tensors, launch_transfers(start, "recv from", peer, group)

    def _swap(
        self,
        sending: DeviceSend,
        announced: Sequence[Announced],
        peer: int,
        group: ProcessGroup,
    ) -> _Coming:
        """As one, on the current stream, which has what is sent."""
        tensors = [self._empty(one) for one in announced]
        ways = [(dist.isend, t) for t in sending.tensors] + [(dist.irecv, t) for t in tensors]
        calls = [dist.P2POp(way, _bytes(t), group=group, group_peer=peer) for way, t in ways]
        works = launch_transfers(
            lambda: dist.batch_isend_irecv(calls) if calls else [], "swap with", peer, group
        )
        sending.started(works)
        return tensors, works

    def _place(self, one: Announced) -> torch.device:
        if self._device is not None and self._device.type == one.kind:
            return self._device
        return torch.device(one.kind)

    def _empty(self, one: Announced) -> Tensor:
        return torch.empty(one.shape, dtype=one.dtype, device=self._place(one))

    def _beside(self, device: torch.device) -> "torch.cuda.StreamContext | nullcontext[None]":
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor: NCCL has not all dtypes."""
    return tensor.view(-1).view(torch.uint8)

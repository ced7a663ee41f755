"""Tensors that a device moves itself (NCCL), beside the messages that announce them.

The message of a stage travels over the host; its header says dtype and shape of each tensor that
comes apart. So the host reads no memory of the device and waits for nothing on it: a send is queued
behind what the current stream has done, a receive on a stream of its own, where it waits for no
computation, and the current stream waits for a receive just before its first use.

Invariant: transfers are queued where the schedule lists them, sends and receives alike, which is
the order that `check(edges="pair_fifo" or "group_fifo")` has proved.

    apart = device_kinds(group)                              # frozenset({"cuda"})
    sending = DeviceSend(handle, start_sends(tensors, peer, group), tensors)
    tensors, works = Receiver(None).start(announced, peer, group)
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from comm_collectives.p2p import SendHandle
from moe_pipeline._torch_private import backend_by_device
from moe_pipeline.errors import ScheduleError
from moe_pipeline.executor.stage_message import Announced
from moe_pipeline.schedules.table import Schedule, check

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
    communicators = 2 if has_two else 1
    edges: Literal["pair_fifo", "group_fifo"] = "group_fifo" if is_bound else "pair_fifo"
    problems = check(schedule, edges=edges, communicators=communicators)
    if problems:
        raise ScheduleError(
            f"schedule {schedule.name} would not end on {communicators} process group"
            f"{'s' * has_two} that transfer in order: {problems[0]}; let add_transfers place its "
            "sends and receives" + ("" if has_two else ", or give a backward_group")
        )


def start_sends(tensors: Sequence[Tensor], peer: int, group: ProcessGroup) -> list[Work]:
    """Queue dense tensors for a peer, behind what the current stream has done."""
    works = [dist.isend(tensor, group=group, group_dst=peer) for tensor in tensors]
    return [work for work in works if work is not None]


@final
class DeviceSend:
    """A message under way, with the tensors that travel apart from it."""

    def __init__(self, handle: SendHandle, works: list[Work], tensors: Sequence[Tensor]) -> None:
        self._handle, self._works, self._tensors = handle, works, tensors

    def wait(self) -> None:
        """Wait for the message, and let the current stream wait for the tensors."""
        self._handle.wait()
        for work in self._works:
            work.wait()  # without a limit, which would stop the host
        self._works, self._tensors = [], ()

    def is_done(self) -> bool:
        """Whether all of it has ended; stops nothing."""
        return self._handle.is_done() and all(work.is_completed() for work in self._works)


@final
class Receiver:
    """Receives what was announced, on `device` or the current one of its type."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(
        self, announced: Sequence[Announced], peer: int, group: ProcessGroup
    ) -> tuple[list[Tensor], list[Work]]:
        """Queue the receives; the tensors hold nothing until `finish`."""
        tensors, works = [], []
        for one in announced:
            device = torch.device(one.kind)
            if self._device is not None and self._device.type == one.kind:
                device = self._device
            with self._beside(device):
                tensor = torch.empty(one.shape, dtype=one.dtype, device=device)
                work = dist.irecv(tensor, group=group, group_src=peer)
            tensors.append(tensor)
            works += [] if work is None else [work]
        return tensors, works

    def finish(self, tensors: Sequence[Tensor], works: Sequence[Work]) -> None:
        """Let the current stream wait for them, and keep their memory until it is done."""
        for work in works:
            work.wait()
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _beside(self, device: torch.device) -> "torch.cuda.StreamContext | nullcontext[None]":
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])

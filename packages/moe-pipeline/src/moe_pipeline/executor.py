"""Run one rank's row of a schedule.

The executor holds no policy: it performs the actions that the table lists, in that order, and the
table has been proved by `check` before the first one. What a microbatch needs is kept in a
`_Slot`, and each action takes from it what it uses, so that a tensor lives exactly from the action
that makes it to the last one that needs it:

- inputs: until their forward, and on only if an operation of the stage saved them;
- outputs: until their send has ended; the graph keeps gradient edges, not the tensors;
- saved activations, output gradients: until the backward;
- input gradients: until their send has ended.

A stage that recomputes its forward during backward (`torch.utils.checkpoint` around all of it)
saves its inputs and so keeps them until the backward.

    executor = PipelineExecutor(stage, one_f_one_b(4, 8), stage_index=rank, forward_group=pp_group)
    losses = executor.step(inputs, targets)
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from comm_collectives import CommError, SendHandle, isend_tensors, recv_tensors
from moe_pipeline.checker import check
from moe_pipeline.errors import ScheduleError, StageTransferError
from moe_pipeline.schedule import Action, Kind, Schedule
from moe_pipeline.stage_io import (
    GradientSink,
    Stage,
    StageOutput,
    gate_inputs,
    pack_activations,
    pack_gradients,
    unpack_activations,
    unpack_gradients,
)

# Sends whose receiver has not caught up, per direction. Holds their tensors' memory down; any
# number from 1 is free of deadlock for a schedule that passes check(send_buffers=1).
_MAX_SENDS_UNDER_WAY = 4


@final
class PipelineExecutor:
    """Runs a schedule on this rank's stage; see the module's docstring.

    Args:
        stage: called as `stage(*inputs, target=target)`, returns a `StageOutput`.
        schedule: one stage on each rank; checked here.
        stage_index: which stage this rank runs, also its rank in the groups.
        forward_group: ranks of the stages, in order; None: the default group. Not used when the
            schedule has one stage.
        backward_group: the same ranks, for gradients; None: the forward group.
        device: where received tensors are put; None: as `recv_tensors` leaves them.
        timeout_s: limit for each transfer, which includes waiting for the other stage to compute;
            None: that of the group.

    Raises:
        ScheduleError: `check` finds problems.
        ValueError: `stage_index` is not in the schedule, lies with another stage on one rank, or
            does not fit the groups.
    """

    def __init__(
        self,
        stage: Stage,
        schedule: Schedule,
        *,
        stage_index: int,
        forward_group: ProcessGroup | None = None,
        backward_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        problems = check(schedule)
        if problems:
            shown = "; ".join(str(problem) for problem in problems[:5])
            raise ScheduleError(
                f"schedule {schedule.name} has {len(problems)} problems, the first: {shown}"
            )
        self.stage = stage
        self.schedule = schedule
        self.stage_index = stage_index
        self._actions = _row_of(schedule, stage_index)
        self._is_first = stage_index == 0
        self._is_last = stage_index == schedule.num_stages - 1
        self._forward_group = forward_group
        self._backward_group = forward_group if backward_group is None else backward_group
        if schedule.num_stages > 1:
            for name, group in (
                ("forward_group", self._forward_group),
                ("backward_group", self._backward_group),
            ):
                _check_group(name, group, schedule.num_stages, stage_index)
        self._device = device
        self._timeout_s = timeout_s
        self._do: dict[Kind, Callable[[_Step, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._recv_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._recv_backward,
        }

    def step(
        self,
        inputs: Sequence[tuple[Tensor, ...]] | None = None,
        targets: Sequence[object] | None = None,
    ) -> list[Tensor | None]:
        """Run all microbatches; gradients add up in the parameters' `.grad`.

        Every rank of the groups must call it. Losses are neither scaled nor averaged: what the
        stages return is differentiated as it is, so divide by tokens or microbatches in the stage.

        Args:
            inputs: on the first stage one tuple of tensors for each microbatch; ignored elsewhere.
            targets: one object for each microbatch, given to this rank's stage; None: each is None.

        Returns:
            For each microbatch this stage's loss, detached, or None where it returned none.

        Raises:
            ValueError: wrong number of inputs or targets; the last stage returned no loss.
            StageTransferError: a transfer failed; names stage, rank and action.
        """
        count = self.schedule.num_microbatches
        if self._is_first and (inputs is None or len(inputs) != count):
            got = "none" if inputs is None else f"{len(inputs)}"
            raise ValueError(
                f"schedule {self.schedule.name} has {count} microbatches; "
                f"the first stage got {got} inputs"
            )
        if targets is not None and len(targets) != count:
            raise ValueError(
                f"schedule {self.schedule.name} has {count} microbatches; "
                f"stage {self.stage_index} got {len(targets)} targets"
            )
        given = list(inputs) if self._is_first and inputs is not None else [()] * count
        step = _Step(
            slots=[_Slot(inputs=tuple(tensors)) for tensors in given],
            targets=[None] * count if targets is None else list(targets),
        )
        for action in self._actions:
            self._perform(action, step)
        self._settle_all(step)
        return [slot.loss_value for slot in step.slots]

    def _perform(self, action: Action, step: "_Step") -> None:
        transfer = action.kind not in (Kind.FORWARD, Kind.BACKWARD)
        try:
            self._do[action.kind](step, action.microbatch)
        except CommError as error:
            if transfer:
                raise self._transfer_error(str(action), error) from error
            error.add_note(self._where(str(action)))
            raise
        except Exception as error:
            error.add_note(self._where(str(action)))
            raise

    def _settle_all(self, step: "_Step") -> None:
        try:
            step.forward_sends.settle()
            step.backward_sends.settle()
        except CommError as error:
            raise self._transfer_error("the last sends", error) from error

    def _where(self, what: str) -> str:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return f"rank {rank}, stage {self.stage_index}: {what} of schedule {self.schedule.name}"

    def _transfer_error(self, what: str, error: CommError) -> StageTransferError:
        return StageTransferError(f"{self._where(what)} failed: {error}")

    def _recv_forward(self, step: "_Step", microbatch: int) -> None:
        message = recv_tensors(
            src=self.stage_index - 1,
            group=self._forward_group,
            device=self._device,
            timeout_s=self._timeout_s,
        )
        slot = step.slots[microbatch]
        slot.inputs, slot.wants_gradient = unpack_activations(message)

    def _forward(self, step: "_Step", microbatch: int) -> None:
        slot = step.slots[microbatch]
        with torch.set_grad_enabled(self.schedule.has_backward):
            inputs, slot.inputs = slot.inputs, ()
            if self.schedule.has_backward and slot.wants_gradient:
                inputs, slot.sink = gate_inputs(inputs, slot.wants_gradient)
            output = self.stage(*inputs, target=step.targets[microbatch])
        step.targets[microbatch] = None
        self._check_output(output, microbatch)
        slot.loss_value = None if output.loss is None else output.loss.detach()
        if self.schedule.has_backward:
            slot.loss = output.loss
        if not self._is_last:
            slot.outputs = output.tensors
            if self.schedule.has_backward:
                slot.edges = [get_gradient_edge(t) for t in output.tensors if t.requires_grad]

    def _check_output(self, output: StageOutput, microbatch: int) -> None:
        if not isinstance(output, StageOutput):
            raise TypeError(
                f"stage {self.stage_index} must return a StageOutput, got {type(output).__name__}"
            )
        if output.loss is not None and output.loss.dim() != 0:
            raise ValueError(
                f"stage {self.stage_index} returned a loss of shape {tuple(output.loss.shape)} for "
                f"microbatch {microbatch}; reduce it to a scalar"
            )
        if output.loss is None and self._is_last and self.schedule.has_backward:
            raise ValueError(
                f"the last stage returned no loss for microbatch {microbatch}, but schedule "
                f"{self.schedule.name} runs its backward"
            )

    def _send_forward(self, step: "_Step", microbatch: int) -> None:
        slot = step.slots[microbatch]
        message, slot.outputs = pack_activations(slot.outputs), ()
        step.forward_sends.add(
            microbatch,
            isend_tensors(
                message,
                dst=self.stage_index + 1,
                group=self._forward_group,
                timeout_s=self._timeout_s,
            ),
        )

    def _recv_backward(self, step: "_Step", microbatch: int) -> None:
        message = recv_tensors(
            src=self.stage_index + 1,
            group=self._backward_group,
            device=self._device,
            timeout_s=self._timeout_s,
        )
        slot = step.slots[microbatch]
        slot.gradients = unpack_gradients(message, len(slot.edges))
        # The next stage has used these outputs, so their sends have ended.
        step.forward_sends.settle(microbatch)

    def _backward(self, step: "_Step", microbatch: int) -> None:
        slot = step.slots[microbatch]
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        for edge, gradient in zip(slot.edges, slot.gradients, strict=True):
            if gradient is not None:
                roots.append(edge)
                gradients.append(gradient)
        if slot.loss is not None and slot.loss.requires_grad:
            roots.append(get_gradient_edge(slot.loss))
            gradients.append(torch.ones_like(slot.loss))
        slot.edges, slot.gradients, slot.loss = [], [], None
        if roots:
            torch.autograd.backward(roots, gradients)

    def _send_backward(self, step: "_Step", microbatch: int) -> None:
        slot = step.slots[microbatch]
        message = pack_gradients(slot.sink.gradients)
        slot.sink = GradientSink()
        step.backward_sends.add(
            microbatch,
            isend_tensors(
                message,
                dst=self.stage_index - 1,
                group=self._backward_group,
                timeout_s=self._timeout_s,
            ),
        )


@dataclass(slots=True)
class _Slot:
    """What one microbatch holds on this rank between two actions."""

    inputs: tuple[Tensor, ...] = ()
    wants_gradient: list[bool] = field(default_factory=list)
    sink: GradientSink = field(default_factory=GradientSink)
    outputs: tuple[Tensor, ...] = ()
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    loss: Tensor | None = None
    loss_value: Tensor | None = None


@final
class _Outbox:
    """Sends under way in one direction, oldest first."""

    def __init__(self) -> None:
        self._handles: deque[tuple[int, SendHandle]] = deque()

    def add(self, microbatch: int, handle: SendHandle) -> None:
        self._handles.append((microbatch, handle))
        while len(self._handles) > _MAX_SENDS_UNDER_WAY:
            self._handles.popleft()[1].wait()

    def settle(self, through: int | None = None) -> None:
        """End the sends up to and with microbatch `through`, if it is under way; None: all."""
        if through is not None and all(through != number for number, _ in self._handles):
            return
        while self._handles:
            number, handle = self._handles.popleft()
            handle.wait()
            if number == through:
                return


@dataclass(slots=True)
class _Step:
    slots: list[_Slot]
    targets: list[object]
    forward_sends: _Outbox = field(default_factory=_Outbox)
    backward_sends: _Outbox = field(default_factory=_Outbox)


def _row_of(schedule: Schedule, stage_index: int) -> tuple[Action, ...]:
    rank = schedule.stage_ranks().get(stage_index)
    if rank is None:
        raise ValueError(
            f"stage_index={stage_index} is not in schedule {schedule.name}, which has stages "
            f"0..{schedule.num_stages - 1}"
        )
    row = schedule.ranks[rank]
    halves = [a for a in row if a.kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)]
    if halves:
        raise ValueError(
            f"schedule {schedule.name} splits backwards ({halves[0]}), which this executor does "
            "not run; choose one with whole backwards such as 1f1b"
        )
    others = sorted({action.stage for action in row} - {stage_index})
    if others or rank != stage_index:
        beside = f" beside stages {others}" if others else ""
        raise ValueError(
            f"schedule {schedule.name} puts stage {stage_index} on rank {rank}{beside}; this "
            "executor runs one stage on each rank, in order"
        )
    return row


def _check_group(name: str, group: ProcessGroup | None, num_stages: int, stage_index: int) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size != num_stages or rank != stage_index:
        raise ValueError(
            f"{name} has {size} ranks and this is rank {rank} of it; the schedule has {num_stages} "
            f"stages and stage_index={stage_index}; give the ranks of the stages, in order"
        )

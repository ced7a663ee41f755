"""Run a schedule: one rank's row over process groups, or all rows in one process.

The executor holds no policy: it performs the actions that the table lists, in that order, and the
table has been proved by `check` before the first one. A tensor lives exactly from the action that
makes it to the last one that needs it:

- inputs: until their forward, and on only if an operation of the stage saved them;
- outputs: until their receiver is known to have them, or the next stage on this rank takes them;
- saved activations: until B or I; what the queue of weight gradients keeps of them: until W;
- output gradients: until the first operation of the backward has used them;
- input gradients: as outputs.

A stage that recomputes its forward during backward (`torch.utils.checkpoint` around all of it)
saves its inputs and so keeps them until the backward.

    executor = PipelineExecutor({rank: stage}, one_f_one_b(4, 8), rank=rank, forward_group=pp_group)
    losses = executor.step(inputs, targets)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_pipeline.errors import StageTransferError
from moe_pipeline.executor.edges import GroupLinks, LinkBrokenError, Links, LocalLinks, Transport
from moe_pipeline.executor.execution_plan import Table
from moe_pipeline.executor.memory_track import MemoryTrack
from moe_pipeline.executor.microbatch_state import Slot
from moe_pipeline.executor.stage_io import Stage, StageOutput, gate_inputs, gate_output
from moe_pipeline.executor.stage_message import activations, gradients
from moe_pipeline.schedules.table import Action, Kind, Schedule
from moe_pipeline.weight_grad import WeightQueue, split_backward

_Key = tuple[int, int]  # stage, microbatch


@final
class PipelineExecutor:
    """Runs a schedule; see the module's docstring.

    Args:
        stages: by number the stages that this rank computes, each called as
            `stage(*inputs, target=target)` and returning a `StageOutput`.
        schedule: any that `check` accepts.
        rank: which row of the schedule this process performs, also its rank in the groups. None:
            all of them, in this process alone.
        forward_group: the ranks of the schedule, in order; None: the default group. Not used when
            the schedule has one rank or `rank` is None.
        backward_group: the same ranks, for gradients; None: the forward group.
        device: where received tensors are put; None: as `recv_tensors` leaves them.
        timeout_s: limit for each transfer, which includes waiting for the other stage to compute;
            None: that of the group.

    Attributes:
        gradient_accumulation_fusion: False; set it before a step to let the products of linear
            layers and experts add themselves to the `grad` of their weight, instead of being added
            to it, from the second microbatch on. Weights to whose gradients somebody listens are
            left alone (`moe_pipeline.weight_grad.accumulation`).

    Raises:
        ScheduleError: `check` finds problems.
        ValueError: `rank` is not in the schedule, has nothing to do in it, or does not fit the
            groups; stages are missing or not this rank's; groups are given without a rank; a limit
            that is not positive.
        RuntimeError: `device` is no device.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        *,
        rank: int | None = None,
        forward_group: ProcessGroup | None = None,
        backward_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._table = Table.of(schedule, rank)
        _check_stages(stages, self._table, rank)
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0, or None")
        self.schedule = schedule
        self.gradient_accumulation_fusion = False
        self._stages = dict(stages)
        self._keys = self._table.keys()
        self._links: Links
        if rank is None:
            if forward_group is not None or backward_group is not None:
                raise ValueError("groups need rank=: which row of the schedule this process runs")
            self._links = LocalLinks()
        elif len(schedule.ranks) == 1:
            self._links = LocalLinks()
        else:
            forward = _group("forward_group", forward_group, len(schedule.ranks), rank)
            backward = forward
            if backward_group is not None:
                backward = _group("backward_group", backward_group, len(schedule.ranks), rank)
            to = None if device is None else torch.device(device)  # refuses one that is none
            transport = Transport(
                forward=forward, backward=backward, device=to, timeout_s=timeout_s
            )
            self._links = GroupLinks(self._table, rank, transport)
        self._failure = ""
        self._do: dict[Kind, Callable[[_Step, Slot, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._whole_backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._recv_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._recv_backward,
        }

    def step(
        self,
        inputs: Sequence[tuple[Any, ...] | None] | None = None,
        targets: Sequence[object] | None = None,
        *,
        track: MemoryTrack | None = None,
    ) -> list[Tensor | None]:
        """Run all microbatches; gradients add up in the parameters' `.grad`.

        Every rank of the groups must call it. Losses are neither scaled nor averaged: what the
        stages return is differentiated as it is, so divide by tokens or microbatches in the stage.

        Args:
            inputs: the first stage's positional arguments for each microbatch that it runs here
                (None for others); ignored on ranks without the first stage.
            targets: one object for each microbatch, given to every stage of this rank; None: each
                is None.
            track: records the activation bytes of this step.

        Returns:
            For each microbatch the sum of the losses that this rank's stages returned, detached,
            or None where they returned none. Summed over ranks and microbatches: the whole loss.

        Raises:
            ValueError: wrong number of inputs or targets; the last stage returned no loss.
            TypeError: inputs of a microbatch that are no tuple or list.
            StageTransferError: a transfer failed, or another rank did; names rank, stage, action
                and who is to blame. Every rank whose step needs the failed one raises it.
        """
        if self._failure:
            raise StageTransferError(
                f"an earlier step of schedule {self.schedule.name} failed: {self._failure}; make "
                "new process groups and a new executor"
            )
        self._links.begin()
        step = _Step({}, track)
        self._guard(lambda: self._fill(step, inputs, targets), self._keys[0], "the inputs")
        at = dict.fromkeys(self._table.rows, 0)
        moved = True
        while moved:
            moved = False
            for rank, row in self._table.rows.items():
                while at[rank] < len(row) and self._links.ready(row[at[rank]]):
                    self._perform(step, row[at[rank]])
                    at[rank] += 1
                    moved = True
        self._guard(self._links.settle, self._keys[-1], "the last sends")
        if track is not None:
            track.finish()
        return self._losses(step)

    def _fill(
        self,
        step: "_Step",
        inputs: Sequence[tuple[Any, ...] | None] | None,
        targets: Sequence[object] | None,
    ) -> None:
        """Make the slots, with what the caller gives."""
        count, name = self.schedule.num_microbatches, self.schedule.name
        needed = inputs if any(stage == 0 for stage, _ in self._keys) else None
        for what, given in (("inputs", needed), ("targets", targets)):
            if given is not None and len(given) != count:
                raise ValueError(
                    f"schedule {name} has {count} microbatches, but {len(given)} {what} are given"
                )
        for stage, microbatch in self._keys:
            slot = Slot(target=None if targets is None else targets[microbatch])
            if stage == 0:
                first = None if needed is None else needed[microbatch]
                if first is None:
                    raise ValueError(
                        f"schedule {name} runs microbatch {microbatch} of the first stage on this "
                        "rank, but its inputs are not given; give a tuple for it"
                    )
                if not isinstance(first, tuple | list):
                    raise TypeError(
                        f"the inputs of microbatch {microbatch} are a {type(first).__name__}; give "
                        "a tuple of the first stage's positional arguments, such as (x,)"
                    )
                slot.given = tuple(first)
            step.slots[stage, microbatch] = slot

    def _losses(self, step: "_Step") -> list[Tensor | None]:
        losses: list[Tensor | None] = [None] * self.schedule.num_microbatches
        for (_, microbatch), slot in step.slots.items():
            if slot.loss_value is not None:
                before = losses[microbatch]
                losses[microbatch] = slot.loss_value if before is None else before + slot.loss_value
        return losses

    def _perform(self, step: "_Step", action: Action) -> None:
        key = (action.stage, action.microbatch)
        self._guard(lambda: self._do[action.kind](step, step.slots[key], action), key, action)
        if step.track is not None:
            step.track.after(action)

    def _guard(self, do: Callable[[], None], key: _Key, what: object) -> None:
        """Do it; if that fails, tell all ranks before raising here."""
        try:
            do()
        except LinkBrokenError as broken:
            self._failure = self._links.give_up(broken.cause, observed=broken.observed)
            raise StageTransferError(
                f"{self._where(key, what)} failed: {self._failure}"
            ) from broken.__cause__
        except BaseException as error:
            name = self._links.name(self._table.places[key])
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failure = self._links.give_up(f"{name} failed in {what}: {text}", observed=False)
            error.add_note(self._where(key, what))
            raise

    def _where(self, key: _Key, what: object) -> str:
        name = self._links.name(self._table.places[key])
        return f"{name.split(' (')[0]}, stage {key[0]}: {what} of schedule {self.schedule.name}"

    def _recv_forward(self, step: "_Step", slot: Slot, action: Action) -> None:
        slot.arrived = self._links.receive(action)

    def _forward(self, step: "_Step", slot: Slot, action: Action) -> None:
        key = (action.stage, action.microbatch)
        fuses = self.gradient_accumulation_fusion and self.schedule.has_backward
        if fuses or key in self._table.halves:
            slot.queue = WeightQueue(step.first_queue, gradient_accumulation_fusion=fuses)
            if step.first_queue is None:
                step.first_queue = slot.queue
        recording = nullcontext() if step.track is None else step.track.forward(key)
        splitting = nullcontext() if slot.queue is None else split_backward(slot.queue)
        with torch.set_grad_enabled(self.schedule.has_backward):
            inputs = self._take_inputs(slot)
            target, slot.target = slot.target, None
            with recording, splitting:
                output = self._stages[action.stage](*inputs, target=target)
            del inputs, target
            self._check_output(output, action)
            if output.loss is not None:
                slot.loss_value = output.loss.detach()
                slot.loss = output.loss if self.schedule.has_backward else None
            if action.stage < self.schedule.num_stages - 1:
                self._keep_outputs(slot, output.tensors)
                if self._table.is_local(action.stage + 1, action.stage, action.microbatch):
                    step.slots[action.stage + 1, action.microbatch].arrived = slot.take_outputs()

    def _take_inputs(self, slot: Slot) -> tuple[Any, ...]:
        """The inputs, which the slot then holds no longer."""
        if slot.arrived is None:
            given, slot.given = slot.given, ()
            return given
        parcel, slot.arrived = slot.arrived, None
        if not self.schedule.has_backward:
            return tuple(parcel.nest(parcel.tensors))
        tensors, slot.sink = gate_inputs(parcel.tensors, parcel.flags)
        return tuple(parcel.nest(tensors))

    def _keep_outputs(self, slot: Slot, tensors: tuple[Any, ...]) -> None:
        slot.outputs, wanting = activations(tensors)
        if self.schedule.has_backward:
            slot.roots = [gate_output(tensor) for tensor in wanting]

    def _check_output(self, output: StageOutput, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if not isinstance(output, StageOutput):
            raise TypeError(f"stage {stage} must return a StageOutput, got {type(output).__name__}")
        if output.loss is not None and output.loss.dim() != 0:
            raise ValueError(
                f"stage {stage} returned a loss of shape {tuple(output.loss.shape)} for "
                f"microbatch {microbatch}; reduce it to a scalar"
            )
        is_last = stage == self.schedule.num_stages - 1
        if output.loss is None and is_last and self.schedule.has_backward:
            raise ValueError(
                f"the last stage returned no loss for microbatch {microbatch}, but schedule "
                f"{self.schedule.name} runs its backward"
            )

    def _send_forward(self, step: "_Step", slot: Slot, action: Action) -> None:
        self._links.send(action, slot.take_outputs())

    def _recv_backward(self, step: "_Step", slot: Slot, action: Action) -> None:
        slot.put_output_gradients(self._links.receive(action).gradients())

    def _whole_backward(self, step: "_Step", slot: Slot, action: Action) -> None:
        queue, slot.queue = slot.queue, None
        with nullcontext() if queue is None else queue.whole():
            self._backward(step, slot, action)

    def _backward(self, step: "_Step", slot: Slot, action: Action) -> None:
        slot.run_backward()
        stage, microbatch = action.stage, action.microbatch
        if stage > 0 and self._table.is_local(stage - 1, stage, microbatch):
            before = step.slots[stage - 1, microbatch]
            before.put_output_gradients(slot.take_input_gradients())

    def _input_gradient(self, step: "_Step", slot: Slot, action: Action) -> None:
        with nullcontext() if slot.queue is None else slot.queue.deferring():
            self._backward(step, slot, action)

    def _weight_gradient(self, step: "_Step", slot: Slot, action: Action) -> None:
        queue, slot.queue = slot.queue, None
        if queue is not None:
            queue.run()

    def _send_backward(self, step: "_Step", slot: Slot, action: Action) -> None:
        self._links.send(action, gradients(slot.take_input_gradients()))


@final
class _Step:
    """The slots of a step, and what records its memory."""

    def __init__(self, slots: dict[_Key, Slot], track: MemoryTrack | None) -> None:
        self.slots = slots
        self.track = track
        self.first_queue: WeightQueue | None = None


def _check_stages(stages: Mapping[int, Stage], table: Table, rank: int | None) -> None:
    wanted = table.stages()
    if not wanted:
        raise ValueError(
            f"rank {rank} has nothing to do in schedule {table.schedule.name}; give a schedule "
            "whose every row has actions"
        )
    if sorted(stages) != wanted:
        who = "one process runs" if rank is None else f"rank {rank} runs"
        raise ValueError(
            f"{who} stages {wanted} of schedule {table.schedule.name}, but stages {sorted(stages)} "
            "are given; give exactly those, by number"
        )


def _group(name: str, group: ProcessGroup | None, num_ranks: int, rank: int) -> ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError(f"{name}=None is the default group, which does not exist; give one")
    size, at = dist.get_world_size(found), dist.get_rank(found)
    if size != num_ranks or at != rank:
        raise ValueError(
            f"{name} has {size} ranks and this is rank {at} of it; the schedule has {num_ranks} "
            f"ranks and rank={rank}; give its ranks, in order"
        )
    return found

"""Run a schedule: one rank's row over process groups, or all rows in one process.

The executor holds no policy: it performs the actions that the table lists, in that order, and the
table has been proved by `check` before the first one. A tensor lives exactly from the action that
makes it to the last one that needs it:

- inputs: until their forward, and on only if an operation of the stage saved them;
- outputs: until their receiver is known to have them, or the next stage on this rank takes them;
- saved activations: until B or I; what the store of weight gradients keeps of them: until W;
- output gradients: until the first operation of the backward has used them;
- input gradients: as outputs.

A stage that recomputes its forward during backward (`torch.utils.checkpoint` around all of it)
saves its inputs and so keeps them until the backward.

    executor = PipelineExecutor({rank: stage}, one_f_one_b(4, 8), rank=rank, forward_group=pp_group)
    losses = executor.step(inputs, targets)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_pipeline._checks import check_type
from moe_pipeline.errors import MoETypeError, MoEValueError, StageTransferError
from moe_pipeline.executor.alone_edges import AloneEdges
from moe_pipeline.executor.edges import EdgeBrokenError, Edges, GroupEdges, LocalEdges
from moe_pipeline.executor.execution_plan import ExecutionPlan, MicrobatchKey
from moe_pipeline.executor.memory_track import MemoryTrack
from moe_pipeline.executor.microbatch_state import MicrobatchState
from moe_pipeline.executor.options import ExecutorOptions
from moe_pipeline.executor.stage_io import Stage, StageOutput, gate_inputs, gate_output
from moe_pipeline.executor.stage_message import activations, gradients
from moe_pipeline.executor.time_track import TimeTrack
from moe_pipeline.executor.transport import transport_of
from moe_pipeline.schedules.table import COMPUTE, Action, Kind, Schedule
from moe_pipeline.weight_grad import InPlaceAccumulation, WeightGradStore, split_backward

_OPTIONS = ExecutorOptions()


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
        options: device, time limit, how gradients are accumulated.

    Raises:
        ScheduleError: `check` finds problems.
        ValueError: `rank` is not in the schedule, has nothing to do in it, or does not fit the
            groups; stages are missing or not this rank's; groups are given without a rank.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        *,
        rank: int | None = None,
        forward_group: ProcessGroup | None = None,
        backward_group: ProcessGroup | None = None,
        options: ExecutorOptions = _OPTIONS,
    ) -> None:
        check_type("stages", stages, Mapping, hint=" from number to stage")
        check_type("schedule", schedule, Schedule)
        check_type("options", options, ExecutorOptions)
        self._plan = ExecutionPlan.of(schedule, rank)
        _check_stages(stages, self._plan, rank)
        self.schedule = schedule
        fuses = options.gradient_accumulation_fusion and schedule.has_backward
        self._accumulation = InPlaceAccumulation() if fuses else None
        self._stages = dict(stages)
        self._keys = self._plan.keys()
        self._edges: Edges
        if rank is None:
            if forward_group is not None or backward_group is not None:
                raise MoEValueError(
                    "groups need rank=: which row of the schedule this process runs"
                )
            self._edges = LocalEdges()
        elif len(schedule.ranks) == 1:
            self._edges = LocalEdges()
        elif options.alone is not None:
            self._edges = AloneEdges(self._plan, options.alone)
        else:
            transport = transport_of(schedule, rank, (forward_group, backward_group), options)
            self._edges = GroupEdges(self._plan, rank, transport)
        self._failure = ""
        self._do: dict[Kind, Callable[[_Step, MicrobatchState, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._whole_backward,
            Kind.INPUT_GRADIENT: self._input_gradient,
            Kind.WEIGHT_GRADIENT: self._weight_gradient,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECV_FORWARD: self._post,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECV_BACKWARD: self._post,
        }

    def step(
        self,
        inputs: Sequence[tuple[Any, ...] | None] | None = None,
        targets: Sequence[object] | None = None,
        *,
        track: MemoryTrack | None = None,
        times: TimeTrack | None = None,
        around: Callable[[Action], AbstractContextManager[object]] | None = None,
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
            times: records when each computation of this step runs.
            around: makes a context that each computation of this step runs in. What it raises is an
                error of that computation.

        Returns:
            For each microbatch the sum of the losses that this rank's stages returned, detached,
            or None where they returned none. Summed over ranks and microbatches: the whole loss.

        Raises:
            ValueError: wrong number of inputs or targets; the last stage returned no loss; a
                schedule with backwards under `no_grad`.
            TypeError: inputs of a microbatch that are no tuple or list.
            StageTransferError: a transfer failed, or another rank did; names rank, stage, action
                and who is to blame. Every rank whose step needs the failed one raises it.
        """
        if self._failure:
            raise StageTransferError(
                f"an earlier step of schedule {self.schedule.name} failed: {self._failure}; make "
                "new process groups and a new executor"
            )
        self._guard(self._edges.begin, self._keys[0], "the first receives")
        step = _Step({}, track, times, around)
        self._guard(lambda: self._fill(step, inputs, targets), self._keys[0], "the inputs")
        at = dict.fromkeys(self._plan.rows, 0)
        moved = True
        while moved:
            moved = False
            for rank, row in self._plan.rows.items():
                while at[rank] < len(row) and self._edges.ready(row[at[rank]]):
                    self._perform(step, row[at[rank]])
                    at[rank] += 1
                    moved = True
        self._guard(self._edges.settle, self._keys[-1], "the last sends")
        if track is not None:
            track.finish()
        return self._losses(step)

    def _fill(
        self,
        step: "_Step",
        inputs: Sequence[tuple[Any, ...] | None] | None,
        targets: Sequence[object] | None,
    ) -> None:
        """Make the states, with what the caller gives."""
        count, name = self.schedule.num_microbatches, self.schedule.name
        if self.schedule.has_backward and not torch.is_grad_enabled():
            raise MoEValueError(
                f"schedule {name} runs backwards, but step was called under no_grad or "
                "inference_mode; call it outside, or run a schedule of forwards"
            )
        needed = inputs if any(stage == 0 for stage, _ in self._keys) else None
        for what, given in (("inputs", needed), ("targets", targets)):
            if given is not None and len(given) != count:
                raise MoEValueError(
                    f"schedule {name} has {count} microbatches, but {len(given)} {what} are given"
                )
        for stage, microbatch in self._keys:
            first = None if needed is None or stage else needed[microbatch]
            if first is None and stage == 0:
                raise MoEValueError(
                    f"schedule {name} runs microbatch {microbatch} of the first stage on this "
                    "rank, but its inputs are not given; give a tuple for it"
                )
            if first is not None:
                check_type(f"inputs[{microbatch}]", first, tuple, list, hint=", such as (x,)")
            step.states[stage, microbatch] = MicrobatchState(
                given=tuple(first or ()), target=None if targets is None else targets[microbatch]
            )

    def _losses(self, step: "_Step") -> list[Tensor | None]:
        losses: list[Tensor | None] = [None] * self.schedule.num_microbatches
        for (_, microbatch), state in step.states.items():
            if state.loss_value is not None:
                before = losses[microbatch]
                losses[microbatch] = (
                    state.loss_value if before is None else before + state.loss_value
                )
        return losses

    def _perform(self, step: "_Step", action: Action) -> None:
        key = (action.stage, action.microbatch)
        state = step.states[key]
        if state.awaited is not None:
            awaited = state.awaited
            self._guard(lambda: self._take(state, awaited), key, awaited)
        timed = step.times if action.kind in COMPUTE else None
        with nullcontext() if timed is None else timed.around(action):
            self._guard(lambda: self._run(step, state, action), key, action)
        if step.track is not None:
            step.track.after(action)

    def _run(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        inside = step.around if action.kind in COMPUTE else None
        with nullcontext() if inside is None else inside(action):
            self._do[action.kind](step, state, action)

    def _guard(self, do: Callable[[], None], key: MicrobatchKey, what: object) -> None:
        """Do it; if that fails, tell all ranks before raising here."""
        try:
            do()
        except EdgeBrokenError as broken:
            self._failure = self._edges.give_up(broken.cause, observed=broken.observed)
            raise StageTransferError(
                f"{self._where(key, what)} failed: {self._failure}"
            ) from broken.__cause__
        except BaseException as error:
            name = self._edges.name(self._plan.places[key])
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failure = self._edges.give_up(f"{name} failed in {what}: {text}", observed=False)
            error.add_note(self._where(key, what))
            raise

    def _where(self, key: MicrobatchKey, what: object) -> str:
        name = self._edges.name(self._plan.places[key])
        return f"{name.split(' (')[0]}, stage {key[0]}: {what} of schedule {self.schedule.name}"

    def _post(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        """Ask for a message, which the microbatch's next computation takes."""
        self._edges.post(action)
        state.awaited = action

    def _take(self, state: MicrobatchState, awaited: Action) -> None:
        state.awaited, message = None, self._edges.receive(awaited)
        if awaited.kind is Kind.RECV_FORWARD:
            state.arrived = message
        else:
            state.put_output_gradients(message.gradients())

    def _forward(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        key = (action.stage, action.microbatch)
        if self._accumulation is not None or key in self._plan.split_backwards:
            state.store = step.new_store(self._accumulation)
        recording = nullcontext() if step.track is None else step.track.forward(key)
        splitting = nullcontext() if state.store is None else split_backward(state.store)
        with torch.set_grad_enabled(self.schedule.has_backward):
            inputs = self._take_inputs(state)
            target, state.target = state.target, None
            with recording, splitting:
                output = self._stages[action.stage](*inputs, target=target)
            del inputs, target
            self._check_output(output, action)
            if output.loss is not None:
                state.loss_value = output.loss.detach()
                state.loss = output.loss if self.schedule.has_backward else None
            if action.stage < self.schedule.num_stages - 1:
                self._keep_outputs(state, output.tensors)
                if self._plan.is_local(action.stage + 1, action.stage, action.microbatch):
                    step.states[action.stage + 1, action.microbatch].arrived = state.take_outputs()

    def _take_inputs(self, state: MicrobatchState) -> tuple[Any, ...]:
        """The inputs, which the state then holds no longer."""
        if state.arrived is None:
            given, state.given = state.given, ()
            return given
        message, state.arrived = state.arrived, None
        if not self.schedule.has_backward:
            return tuple(message.tree(message.tensors))
        tensors, state.sink = gate_inputs(message.tensors, message.flags)
        return tuple(message.tree(tensors))

    def _keep_outputs(self, state: MicrobatchState, tensors: tuple[Any, ...]) -> None:
        state.outputs, wanting = activations(tensors)
        if self.schedule.has_backward:
            state.roots = [gate_output(tensor) for tensor in wanting]

    def _check_output(self, output: StageOutput, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        if not isinstance(output, StageOutput):
            raise MoETypeError(
                f"stage {stage} must return a StageOutput, got {type(output).__name__}"
            )
        if output.loss is not None and output.loss.dim() != 0:
            raise MoEValueError(
                f"stage {stage} returned a loss of shape {tuple(output.loss.shape)} for "
                f"microbatch {microbatch}; reduce it to a scalar"
            )
        is_last = stage == self.schedule.num_stages - 1
        if output.loss is None and is_last and self.schedule.has_backward:
            raise MoEValueError(
                f"the last stage returned no loss for microbatch {microbatch}, but schedule "
                f"{self.schedule.name} runs its backward"
            )

    def _send_forward(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        self._edges.send(action, state.take_outputs())

    def _whole_backward(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        store, state.store = state.store, None
        with nullcontext() if store is None else store.whole():
            self._backward(step, state, action)

    def _backward(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        state.run_backward()
        stage, microbatch = action.stage, action.microbatch
        if stage > 0 and self._plan.is_local(stage - 1, stage, microbatch):
            before = step.states[stage - 1, microbatch]
            before.put_output_gradients(state.take_input_gradients())

    def _input_gradient(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        with nullcontext() if state.store is None else state.store.deferring():
            self._backward(step, state, action)

    def _weight_gradient(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        store, state.store = state.store, None
        if store is not None:
            store.run()

    def _send_backward(self, step: "_Step", state: MicrobatchState, action: Action) -> None:
        self._edges.send(action, gradients(state.take_input_gradients()))


@final
class _Step:
    """The states of a step, what records its memory and times, and what it runs in."""

    def __init__(
        self,
        states: dict[MicrobatchKey, MicrobatchState],
        track: MemoryTrack | None,
        times: TimeTrack | None,
        around: Callable[[Action], AbstractContextManager[object]] | None,
    ) -> None:
        self.states = states
        self.track, self.times, self.around = track, times, around
        self._first_store: WeightGradStore | None = None

    def new_store(self, accumulation: InPlaceAccumulation | None) -> WeightGradStore:
        """A store for another microbatch, which shares the prepared weights with the others."""
        store = WeightGradStore(accumulation, beside=self._first_store)
        if self._first_store is None:
            self._first_store = store
        return store


def _check_stages(stages: Mapping[int, Stage], plan: ExecutionPlan, rank: int | None) -> None:
    wanted = plan.stages()
    if not wanted:
        raise MoEValueError(
            f"rank {rank} has nothing to do in schedule {plan.schedule.name}; give a schedule "
            "whose every row has actions"
        )
    if sorted(stages) != wanted:
        who = "one process runs" if rank is None else f"rank {rank} runs"
        raise MoEValueError(
            f"{who} stages {wanted} of schedule {plan.schedule.name}, but stages {sorted(stages)} "
            "are given; give exactly those, by number"
        )

"""The interface of `torch.distributed.pipelining` schedules over this package's executor.

For programs that use torch's: import `get_schedule_class` from here and keep the rest. Names,
arguments, splitting into microbatches, losses, scaling and merged outputs are torch's; stages are
its `PipelineStage`. What differs: any number of microbatches, shapes that change between them,
outputs and losses come without graph, and gradients of earlier steps are not scaled again.

    schedule = get_schedule_class("1F1B")(stage, n_microbatches=8, loss_fn=F.cross_entropy)
    logits = schedule.step(tokens) if stage.is_first else schedule.step(target=labels)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.microbatch import merge_chunks

from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.executor import ExecutorOptions, PipelineExecutor
from moe_pipeline.schedules.generators import SCHEDULES
from moe_pipeline.schedules.table import COMPUTE, Kind, Schedule, add_transfers
from moe_pipeline.schedules.views import read_csv
from moe_pipeline.torch_compat.batches import PRE_SPLIT, Batch, pre_split_batch, split_batch
from moe_pipeline.torch_compat.data_parallel import (
    reduced_once,
    reshard,
    reuses_memory_of_gradients,
)
from moe_pipeline.torch_compat.keywords import ScheduleKeywords, checked_keywords
from moe_pipeline.torch_compat.stages import (
    LossFunction,
    Microbatch,
    ModuleStage,
    StepState,
    TorchStage,
    check_stage,
    divided_gradients,
)

_SINGLE = ("forward_then_backward", "1f1b", "zb_1p", "zb_2p")
# These take stages_per_rank=, at any number; the others have two stages on each rank, in a V.
_LOOPED = (
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "interleaved_forward_then_backward",
)
_FOLDED = ("zbv", "v_half", "v_min", "dualpipe_v")
_NAMES_OF_TORCH = {
    "GPipe": "forward_then_backward",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe_v",
}


class _ScheduleType(type):
    """The type of the classes here: one may equal the class of torch that it stands for.

    Builders ask `schedule_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV)`.
    """

    _stands_for: type | None = None

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls._stands_for is not None and cls._stands_for is other)

    def __hash__(cls) -> int:
        return type.__hash__(cls) if cls._stands_for is None else hash(cls._stands_for)


class PipelineSchedule(metaclass=_ScheduleType):
    """What torch's single and multi-stage schedules have in common; get one of their classes.

    Attributes:
        schedule: the table that `step` runs.
    """

    _generate: ClassVar[Callable[..., Schedule] | None] = None
    _takes_stages_per_rank: ClassVar[bool] = False

    def __init__(
        self,
        stages: Sequence[TorchStage],
        n_microbatches: int,
        loss_fn: LossFunction | None,
        scale_grads: bool,
        keywords: ScheduleKeywords,
    ) -> None:
        for stage in stages:
            check_stage(stage)
        self._keywords = checked_keywords(keywords)
        self._loss_fn, self._scale_grads = loss_fn, scale_grads
        self._stages = {stage.stage_index: stage for stage in stages}
        self._wrapped = {
            i: ModuleStage(stage.submod, is_last=i == stage.num_stages - 1)
            for i, stage in self._stages.items()
        }
        self._executors: dict[bool, PipelineExecutor] = {}
        self._use(self._make_schedule(stages[0], n_microbatches))

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a batch forward and backward. All ranks of the stages' group must call it.

        Args:
            args: on the rank of the first stage its positional arguments, for the whole batch.
            target: on the rank of the last stage, with a `loss_fn`.
            losses: on the rank of the last stage cleared and filled with the losses of the
                microbatches, unscaled and detached.
            return_outputs: whether to keep, merge and return what the last stage computes.
            loss_kwargs: handed to `loss_fn`.
            kwargs: keyword arguments for this rank's stages. `arg_mbs`, `kwarg_mbs` and
                `target_mbs` instead of all these give batches that are split already;
                `finalize_gradients` is taken for torch's sake and means nothing here.

        Returns:
            On the rank of the last stage its outputs, detached; else None.
        """
        backward = self._loss_fn is not None
        if backward and not torch.is_grad_enabled():
            raise MoEValueError("step runs backward and was called without gradients; call eval")
        batch = self._split(args, kwargs, target)
        state = StepState(
            loss_fn=self._loss_fn, loss_kwargs=loss_kwargs or {}, keeps_outputs=return_outputs
        )
        modules = [stage.submod for _, stage in sorted(self._stages.items())]
        divided: AbstractContextManager[None] = nullcontext()
        reshard(modules if backward else ())
        if backward and self._scale_grads:
            divided = divided_gradients(
                self._parameters(),
                self.schedule.num_microbatches,
                copies=any(map(reuses_memory_of_gradients, modules)),
            )
        with divided, reduced_once(modules if backward else ()):
            return self._run(batch, state, losses, with_backward=backward)

    def eval(
        self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """As `step`, its keywords included, forwards only; without `target` there are no losses."""
        keeps, loss_kwargs = kwargs.pop("return_outputs", True), kwargs.pop("loss_kwargs", None)
        batch = self._split(args, kwargs, target)
        loss_fn = None if batch.targets is None else self._loss_fn
        state = StepState(loss_fn=loss_fn, loss_kwargs=loss_kwargs or {}, keeps_outputs=keeps)
        return self._run(batch, state, losses, with_backward=False)

    def _use(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._executors.clear()
        self._executor(with_backward=self._loss_fn is not None)

    def _parameters(self) -> list[nn.Parameter]:
        """Each once, those that stages of this rank share too."""
        modules = [stage.submod for stage in self._stages.values()]
        return list({p: None for module in modules for p in module.parameters()})

    def _make_schedule(self, stage: TorchStage, n_microbatches: int) -> Schedule:
        generate, ranks, count = type(self)._generate, stage.group_size, stage.num_stages
        if generate is None:
            raise MoETypeError(
                f"{type(self).__name__} is a base class; get_schedule_class makes one"
            )
        if not self._takes_stages_per_rank:
            return generate(ranks, n_microbatches)
        if count % ranks:
            raise MoEValueError(f"{count} stages do not divide evenly over {ranks} ranks")
        return generate(ranks, n_microbatches, stages_per_rank=count // ranks)

    def _executor(self, *, with_backward: bool) -> PipelineExecutor:
        if with_backward not in self._executors:
            stage = next(iter(self._stages.values()))
            if stage.num_stages != self.schedule.num_stages:
                raise MoEValueError(
                    f"schedule {self.schedule.name} has {self.schedule.num_stages} stages on "
                    f"{stage.group_size} ranks, but the pipeline has {stage.num_stages}"
                )
            alone = stage.group_size == 1
            self._executors[with_backward] = PipelineExecutor(
                self._wrapped,
                self.schedule if with_backward else _forwards_of(self.schedule),
                rank=stage.group_rank,
                forward_group=None if alone else stage.group,
                backward_group=None if alone else self._keywords.get("backward_group"),
                options=replace(
                    self._keywords.get("executor_options", ExecutorOptions()), device=stage.device
                ),
            )
        return self._executors[with_backward]

    def _run(
        self, batch: Batch, state: StepState, losses: list[Tensor] | None, *, with_backward: bool
    ) -> Any:
        has_last = self.schedule.num_stages - 1 in self._stages
        if has_last and with_backward and batch.targets is None:
            raise MoEValueError("this rank has the last stage and its loss_fn; give it target=")
        if has_last and losses is not None and state.loss_fn is None:
            raise MoEValueError("losses= has nothing to be filled with without loss_fn and target=")
        for stage in self._wrapped.values():
            stage.during(state)
        targets = batch.targets or [None] * self.schedule.num_microbatches
        extras = [
            Microbatch(number, kwargs, target)
            for number, (kwargs, target) in enumerate(zip(batch.kwargs, targets, strict=True))
        ]
        try:
            self._executor(with_backward=with_backward).step(batch.args, extras)
        finally:
            for stage in self._wrapped.values():
                stage.during(None)
        if not has_last:
            return None
        if losses is not None:
            losses[:] = [state.losses[m] for m in sorted(state.losses)]
        if not state.keeps_outputs:
            return None
        chunks = [state.outputs[m] for m in sorted(state.outputs)]
        return merge_chunks(chunks, self._keywords.get("output_merge_spec"))

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        """The batch in microbatches; takes what is split already out of `kwargs`."""
        count = self.schedule.num_microbatches
        kwargs.pop("finalize_gradients", None)
        pre_split = {name: kwargs.pop(name, None) for name in PRE_SPLIT}
        if any(value is not None for value in pre_split.values()):
            return pre_split_batch(pre_split, count, args or kwargs or target is not None)
        keywords = self._keywords
        specs = (keywords.get("args_chunk_spec"), keywords.get("kwargs_chunk_spec"))
        return split_batch(args, kwargs, target, count, specs)


class PipelineScheduleSingle(PipelineSchedule):
    """A schedule with one stage on each rank, made as torch's of this name.

    Args:
        stage: a `PipelineStage` of `torch.distributed.pipelining`; gradients of a module in DDP or
            FSDP2 are reduced once, after the last weight gradient of the step.
        n_microbatches: any number from 1.
        loss_fn: `loss_fn(output, target, **loss_kwargs)`, 0-d; None: `step` runs forwards only.
        scale_grads: divide gradients by `n_microbatches`: right for a loss that is a mean.
        keywords: see `ScheduleKeywords`.

    Raises:
        ValueError: a size below 1, or stages that do not fit the ranks of the group.
        TypeError: an unknown option; not a stage.
    """

    def __init__(
        self,
        stage: TorchStage,
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        *,
        scale_grads: bool = True,
        **keywords: Unpack[ScheduleKeywords],
    ) -> None:
        super().__init__([stage], n_microbatches, loss_fn, scale_grads, keywords)


class PipelineScheduleMulti(PipelineSchedule):
    """A schedule with several stages on each rank; `stages` are this rank's, else as the single."""

    def __init__(
        self,
        stages: Sequence[TorchStage],
        n_microbatches: int,
        loss_fn: LossFunction | None = None,
        *,
        scale_grads: bool = True,
        **keywords: Unpack[ScheduleKeywords],
    ) -> None:
        if not isinstance(stages, list | tuple) or not stages:
            raise MoETypeError(f"stages is {stages!r}; give a list of this rank's stages")
        super().__init__(stages, n_microbatches, loss_fn, scale_grads, keywords)


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """A schedule read from a file of torch's; `_load_csv` comes before the first step."""

    _stands_for = torch_schedules._PipelineScheduleRuntime

    def _load_csv(
        self,
        filename: str,
        format: Literal["compute_only", "compute_comms"] = "compute_only",
    ) -> None:
        """Run the schedule of a file from now on, as torch's method of this name.

        Raises:
            ValueError: it has other stages, microbatches or ranks than this schedule; or `format`.
            ScheduleError: the file is no schedule, or one that would not end.
        """
        if format not in ("compute_only", "compute_comms"):
            raise MoEValueError(f"format={format!r} is neither compute_only nor compute_comms")
        found = read_csv(filename)
        if format == "compute_only":
            rows = tuple(tuple(a for a in row if a.kind in COMPUTE) for row in found.ranks)
            found = add_transfers(replace(found, ranks=rows))
        stage = next(iter(self._stages.values()))
        wanted = (self.schedule.num_microbatches, stage.num_stages, stage.group_size)
        has = (found.num_microbatches, found.num_stages, len(found.ranks))
        if has != wanted:
            raise MoEValueError(
                f"{filename} has {has[0]} microbatches, {has[1]} stages and {has[2]} ranks; this "
                f"schedule was made for {wanted[0]}, {wanted[1]} and {wanted[2]}"
            )
        self._use(found)

    def _make_schedule(self, stage: TorchStage, n_microbatches: int) -> Schedule:
        return Schedule(
            name="that of no file yet",
            num_stages=stage.num_stages,
            num_microbatches=n_microbatches,
            ranks=(),
        )

    def _executor(self, *, with_backward: bool) -> PipelineExecutor:
        if not self.schedule.ranks:
            raise MoEValueError("this schedule runs a file; call _load_csv before step")
        return super()._executor(with_backward=with_backward)

    def _use(self, schedule: Schedule) -> None:
        if schedule.ranks:
            super()._use(schedule)
        else:
            self.schedule = schedule


# For builders that ask issubclass(schedule_class, PipelineScheduleMulti) of torch.
torch_schedules.PipelineScheduleSingle.register(PipelineScheduleSingle)
torch_schedules.PipelineScheduleMulti.register(PipelineScheduleMulti)

_BASES: dict[str, type[PipelineSchedule]] = {
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "_PipelineScheduleRuntime": PipelineScheduleRuntime,
}
_OF_TORCH = {
    "ZBVZeroBubble": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule, by torch's name or this package's; case does not matter.

    Subclasses of `PipelineScheduleSingle` take `stage`, those of `PipelineScheduleMulti` take
    `stages`. DualPipe with copies of stages is for `PipelineExecutor`.

    Raises:
        ValueError: no such schedule; lists those there are.
    """
    names = (*_BASES, *_SINGLE, *_LOOPED, *_FOLDED, *_NAMES_OF_TORCH)
    known = {name.lower(): name for name in names}
    name = known.get(schedule_name.lower())
    if name is None:
        raise MoEValueError(
            f"unknown schedule {schedule_name!r}; expected one of {', '.join(known.values())}"
        )
    return _class_of(name)


@cache
def _class_of(name: str) -> type[PipelineSchedule]:
    if name in _BASES:
        return _BASES[name]
    ours = _NAMES_OF_TORCH.get(name, name)
    base = PipelineScheduleSingle if ours in _SINGLE else PipelineScheduleMulti
    generate = SCHEDULES[ours]
    members = {
        "_generate": staticmethod(generate),
        "_takes_stages_per_rank": ours in _LOOPED,
        "_stands_for": _OF_TORCH.get(name),
    }
    return type(f"Schedule{name}", (base,), {"__doc__": generate.__doc__, **members})


def _forwards_of(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order."""
    rows = tuple(tuple(a for a in row if a.kind == Kind.FORWARD) for row in schedule.ranks)
    return add_transfers(
        replace(schedule, name=f"{schedule.name} (forwards)", ranks=rows, has_backward=False)
    )

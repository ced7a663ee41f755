"""Stages of `torch.distributed.pipelining` as the executor wants them.

Torch's stage is a module with a number, and the loss is a function of the schedule; the executor's
stage returns its part of the loss itself. What a microbatch brings besides the tensors of the stage
before (keyword arguments, the target) travels in the executor's `target`.

    step = StepState(loss_fn=loss_fn, loss_kwargs={}, keeps_outputs=True)
    output = ModuleStage(module, is_last=True).during(step)(x, target=Microbatch(0, {}, target))
    step.losses[0]
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_pipeline.errors import MoETypeError, MoEValueError
from moe_pipeline.executor import StageOutput, map_tensors
from moe_pipeline.torch_compat.data_parallel import check_wrapper
from moe_pipeline.weight_grad import InPlaceAccumulation

LossFunction = Callable[..., Tensor]


class TorchStage(Protocol):
    """The attributes of `torch.distributed.pipelining.PipelineStage` that are used here."""

    # the module; called with what the stage before returned, the first one with the positional
    # arguments of `step`, each with the keyword arguments given on its rank. It may return a
    # `StageOutput` to add an auxiliary loss
    submod: nn.Module
    stage_index: int  # from 0
    num_stages: int  # of the whole pipeline
    device: torch.device  # where received tensors are put
    group: ProcessGroup | None  # the ranks of the pipeline; None: the default group
    group_rank: int  # this rank in it
    group_size: int  # its ranks


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What a stage gets beside the tensors of the stage before."""

    number: int
    kwargs: Mapping[str, Any]
    target: Any


@dataclass(slots=True, kw_only=True)
class StepState:
    """What one step wants of the last stage, and what that left; by number of microbatch."""

    loss_fn: LossFunction | None
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@final
class ModuleStage:
    """Runs a torch stage's module as a `Stage`."""

    def __init__(self, module: nn.Module, *, is_last: bool) -> None:
        self._module, self._is_last = module, is_last
        self._step: StepState | None = None

    def during(self, step: StepState | None) -> "ModuleStage":
        """Serve this step; None: none any more."""
        self._step = step
        return self

    def __call__(self, *inputs: Any, target: object | None) -> StageOutput:
        """One microbatch; `target` is its `Microbatch`."""
        step = self._step
        if step is None or not isinstance(target, Microbatch):
            raise MoETypeError("a ModuleStage runs within the step of its schedule only")
        output, added = self._module(*inputs, **target.kwargs), None
        if isinstance(output, StageOutput):
            added = output.loss
            output = output.tensors[0] if len(output.tensors) == 1 else output.tensors
        if not self._is_last:
            tensors = tuple(output) if isinstance(output, tuple | list) else (output,)
            return StageOutput(tensors=tensors, loss=added)
        if step.keeps_outputs:
            step.outputs[target.number] = map_tensors(torch.Tensor.detach, output)
        if step.loss_fn is None:
            return StageOutput(loss=added)
        loss = step.loss_fn(output, target.target, **step.loss_kwargs)
        step.losses[target.number] = loss.detach()
        return StageOutput(loss=loss if added is None else loss + added)


def check_stage(stage: TorchStage) -> None:
    """Refuse what torch's schedules steer and ours do not."""
    for name in ("submod", "stage_index", "num_stages", "device", "group_rank", "group_size"):
        if not hasattr(stage, name):
            raise MoETypeError(
                f"a {type(stage).__name__} has no {name}; give a PipelineStage of "
                "torch.distributed.pipelining (a list of them for schedules of several stages)"
            )
    check_wrapper(stage.stage_index, stage.submod)
    if getattr(stage, "dw_builder", None) is not None:
        raise MoEValueError(
            f"stage {stage.stage_index} has a dw_builder; leave it out, weight gradients are "
            "deferred by the executor"
        )


@contextmanager
def divided_gradients(
    parameters: Sequence[nn.Parameter], count: int, *, copies: bool = False
) -> Iterator[None]:
    """Divide what is added to the gradients meanwhile, and only that; an error takes it back.

    Gradients of before are put aside, so that they neither lose precision nor are divided again;
    as copies where their memory may be used meanwhile, all of them with `copies`.
    """
    held = [(parameter, parameter.grad) for parameter in parameters]
    before = [
        (p, grad.clone() if copies or InPlaceAccumulation.reuses_grad(p) else grad)
        for p, grad in held
        if grad is not None
    ]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        for parameter, grad in before:
            if parameter.grad is not None:
                grad.add_(parameter.grad)
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, grad in before:
            parameter.grad = grad

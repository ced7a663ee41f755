"""What crosses the border of a stage: its result, and the gradients at both of its ends.

Early release rests on two gates. `gate_inputs` stands between a stage's inputs and its first
operation, so that the gradients of the inputs are caught without keeping the inputs: an input lives
on only if an operation saved it. `gate_output` stands behind an output: the graph keeps neither the
output nor, once its first operation has used it, the gradient that came back for it.

    inputs, sink = gate_inputs([x], [True])
    root, source = gate_output(stage(*inputs))
    source.gradient = received
    root.backward()                                       # sink.gradients has that of x
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from moe_pipeline.errors import MoETypeError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOutput:
    """What a stage returns for one microbatch.

    Attributes:
        tensors: the positional inputs of the next stage; dropped on the last one. Each is a
            tensor, None, a number or string, or a dict, list, tuple or namedtuple of such; number,
            dtypes and shapes may change at every microbatch.
        loss: 0-d, added to what this stage differentiates: on the last stage the whole loss, on
            others the auxiliary losses of their layers; None: nothing to add.

    Raises:
        TypeError: `tensors` is no tuple or list, or `loss` no tensor.
    """

    tensors: tuple[Any, ...] = ()
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        # A bare tensor would be taken for a tuple of its rows.
        if not isinstance(self.tensors, tuple | list):
            raise MoETypeError(
                f"StageOutput got tensors of type {type(self.tensors).__name__}; give a tuple of "
                "what the next stage takes, such as (hidden,)"
            )
        if not isinstance(self.loss, Tensor | None):
            raise MoETypeError(
                f"StageOutput got a loss of type {type(self.loss).__name__}; give a 0-d tensor, or "
                "None"
            )


class Stage(Protocol):
    """A stage: an `nn.Module` or any callable of this form.

    It must not modify its inputs in place: the executor hands them over as views.
    """

    def __call__(self, *inputs: Any, target: object | None) -> StageOutput:
        """Run one microbatch."""
        ...


@dataclass(slots=True)
class GradientSink:
    """Where gated inputs leave their gradients: one for each, None if it had no part."""

    gradients: list[Tensor | None] = field(default_factory=list)


@dataclass(slots=True)
class GradientSource:
    """Where a gated output takes its gradient from, and what it has to look like."""

    shape: torch.Size
    gradient: Tensor | None = None


@final
class _InputGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, sink: GradientSink, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.sink.gradients = list(gradients)
        return (None, None, *(None for _ in gradients))


@final
class _OutputGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: GradientSource, output: Tensor) -> Tensor:
        ctx.source = source
        return output.new_zeros((), dtype=torch.float32)  # of a complex root torch wants a gradient

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, Tensor | None]:
        source: GradientSource = ctx.source
        gradient, source.gradient = source.gradient, None
        return None, gradient


def gate_inputs(
    inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[list[Tensor], GradientSink]:
    """Make the wanted inputs differentiable; their gradients will go to the sink.

    Without a backward through any of them the sink keeps None for each.
    """
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want]
    sink = GradientSink([None] * len(chosen))
    if not chosen:
        return list(inputs), sink
    anchor = torch.empty((), requires_grad=True)
    gated = iter(_InputGate.apply(anchor, sink, *chosen))
    return [next(gated) if want else x for x, want in zip(inputs, wanted, strict=True)], sink


def gate_output(output: Tensor) -> tuple[Tensor, GradientSource]:
    """A 0-d root whose backward is that of `output`, with the gradient that the source then holds.

    The source does not know the root: that would be a cycle through the graph, which none collects.
    """
    source = GradientSource(output.shape)
    return _OutputGate.apply(source, output), source

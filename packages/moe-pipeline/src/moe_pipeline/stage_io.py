"""What crosses the border of a stage: its result, its messages, and the gradients of its inputs.

Early release rests on two things here. `InputGate` stands between a stage's inputs and its first
operation, so that the gradients of the inputs are caught without keeping the inputs: an input lives
on only if an operation saved it. And a message is made of detached tensors, so that nothing but the
send holds an output once it is on its way; its place in the graph is kept as a gradient edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch
from torch import Tensor

from moe_pipeline.errors import StageTransferError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageOutput:
    """What a stage returns for one microbatch.

    Attributes:
        tensors: sent to the next stage, any number, dtypes and shapes; not sent by the last stage.
        loss: 0-d, added to what this stage differentiates: on the last stage the whole loss, on
            others the auxiliary losses of their layers; None: nothing to add.
    """

    tensors: tuple[Tensor, ...] = ()
    loss: Tensor | None = None


class Stage(Protocol):
    """A stage: an `nn.Module` or any callable of this form.

    It must not modify its inputs in place: the executor hands them over as views.
    """

    def __call__(self, *inputs: Tensor, target: object | None) -> StageOutput:
        """Run one microbatch."""
        ...


@dataclass(slots=True)
class GradientSink:
    """Where `InputGate` leaves the gradients: one for each gated input, None if it had no part."""

    gradients: list[Tensor | None] = field(default_factory=list)


@final
class _Gate(torch.autograd.Function):
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


def gate_inputs(
    inputs: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[tuple[Tensor, ...], GradientSink]:
    """Make the wanted inputs differentiable; their gradients will go to the sink.

    Without a backward through any of them the sink keeps None for each.
    """
    chosen = [x for x, want in zip(inputs, wanted, strict=True) if want]
    sink = GradientSink([None] * len(chosen))
    if not chosen:
        return tuple(inputs), sink
    anchor = torch.empty((), requires_grad=True)
    gated = iter(_Gate.apply(anchor, sink, *chosen))
    return tuple(next(gated) if want else x for x, want in zip(inputs, wanted, strict=True)), sink


def pack_activations(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Message to the next stage: which tensors want a gradient, then the tensors."""
    flags = torch.tensor([t.requires_grad for t in tensors], dtype=torch.uint8)
    return [flags, *(t.detach() for t in tensors)]


def unpack_activations(message: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[bool]]:
    """The tensors of `pack_activations`, and which of them want a gradient."""
    flags = [bool(flag) for flag in message[0].tolist()]
    if len(flags) != len(message) - 1:
        raise StageTransferError(
            f"a message of activations announces {len(flags)} tensors and carries "
            f"{len(message) - 1}; do both stages run the same schedule?"
        )
    return tuple(message[1:]), flags


def pack_gradients(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Message to the previous stage: which gradients exist, then those."""
    flags = torch.tensor([g is not None for g in gradients], dtype=torch.uint8)
    return [flags, *(g for g in gradients if g is not None)]


def unpack_gradients(message: Sequence[Tensor], expected: int) -> list[Tensor | None]:
    """The gradients of `pack_gradients`, for `expected` outputs that wanted one."""
    flags = message[0].tolist()
    if len(flags) != expected or sum(flags) != len(message) - 1:
        raise StageTransferError(
            f"a message of gradients covers {len(flags)} tensors, but {expected} sent tensors "
            "want a gradient; do both stages run the same schedule?"
        )
    present = iter(message[1:])
    return [next(present) if flag else None for flag in flags]

"""What one microbatch of one stage holds between two actions.

Each action takes from the state what it uses and leaves what it makes, so that a tensor lives
exactly from the action that makes it to the last one that needs it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_pipeline.errors import StageTransferError
from moe_pipeline.executor.stage_io import GradientSink, GradientSource
from moe_pipeline.executor.stage_message import StageMessage
from moe_pipeline.schedules.table import Action
from moe_pipeline.weight_grad import WeightGradStore


@dataclass(slots=True)
class MicrobatchState:
    """One (stage, microbatch)."""

    awaited: Action | None = None  # a receive that was posted, until the computation that needs it
    given: tuple[object, ...] = ()  # inputs of the first stage, as the caller gave them
    # inputs of another stage, from its reception to its forward
    arrived: StageMessage | None = None
    target: object | None = None  # what the caller gives beside them, until the forward
    # where the gradients of the inputs go, from forward until they are passed on
    sink: GradientSink = field(default_factory=GradientSink)
    outputs: StageMessage | None = None  # from the forward until they are passed on
    # the outputs that want a gradient, from the forward to the backward; their 0-d roots and what
    # those take their gradients from
    roots: list[tuple[Tensor, GradientSource]] = field(default_factory=list)
    loss: Tensor | None = None  # what the stage adds to the loss, from the forward to the backward
    loss_value: Tensor | None = None  # its value, for the caller
    # work on weights that I leaves to W; None where the backward is whole
    store: WeightGradStore | None = None

    def take_outputs(self) -> StageMessage:
        """The outputs, which the state then holds no longer."""
        outputs, self.outputs = self.outputs, None
        return StageMessage([], []) if outputs is None else outputs

    def take_input_gradients(self) -> list[Tensor | None]:
        """The gradients of the inputs, which the state then holds no longer."""
        sink, self.sink = self.sink, GradientSink()
        return sink.gradients

    def put_output_gradients(self, gradients: list[Tensor | None]) -> None:
        """Keep what came back for the outputs, until the backward."""
        if len(gradients) != len(self.roots):
            raise StageTransferError(
                f"gradients of {len(gradients)} tensors came back, but {len(self.roots)} of those "
                "sent want one"
            )
        for gradient, (_, source) in zip(gradients, self.roots, strict=True):
            if gradient is not None and gradient.shape != source.shape:
                raise StageTransferError(
                    f"a gradient of shape {tuple(gradient.shape)} came back for an output of shape "
                    f"{tuple(source.shape)}"
                )
            source.gradient = gradient

    def run_backward(self) -> None:
        """Differentiate the loss, and the outputs for which a gradient came back; frees the graph.

        All roots are 0-d, so torch needs no gradients for them (and need not load the part of it
        that would compare shapes).
        """
        roots = [root for root, source in self.roots if source.gradient is not None]
        if self.loss is not None and self.loss.requires_grad:
            roots.append(self.loss)
        self.roots, self.loss = [], None
        if roots:
            torch.autograd.backward(roots)

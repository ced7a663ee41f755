"""Memory of weight gradients that outlives a step.

Experts have many weights and few rows each, so that making fresh memory for their gradients in each
backward, and adding it to `grad` afterwards, can cost as much as the products that fill it. Here
each product adds itself into `param.grad`, whose memory is kept when `zero_grad` lets go of it:

    buffers = GradBuffers()
    target = buffers.target("down", weight)  # in a backward; weight.grad is now set
    target.write([3], [grad_y.t()], [act])   # weight.grad[3] (+)= grad_y.t() @ act

Invariant: memory that is not yet its weight's `grad` is written, never added to.

Autograd does not see these gradients: `torch.autograd.grad`, hooks on the weights and
post-accumulate hooks (those of DDP and FSDP among them) get nothing. After
`zero_grad(set_to_none=True)` the next backward writes into the memory of the previous gradient:
clone a gradient that is to be kept.
"""

from collections.abc import Sequence
from typing import final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from moe_pipeline.weight_grad.accumulation import add_product


@final
class GradTarget:
    """Where experts' products are put: a gradient [E, ...], and whether it holds something.

    Attributes:
        grad: the whole gradient.
        accumulate: whether products are added to what is there.
    """

    def __init__(self, grad: Tensor, accumulate: bool) -> None:
        self.grad = grad
        self.accumulate = accumulate
        self._of_expert = grad.unbind()

    def write(
        self, experts: Sequence[int], lefts: Sequence[Tensor], rights: Sequence[Tensor]
    ) -> None:
        """Put `left @ right` into each expert's gradient, or add it."""
        outs = [self._of_expert[expert] for expert in experts]
        if self.accumulate:
            on_cpu = self.grad.device.type == "cpu"
            scratch = torch.empty_like(outs[0]) if outs and on_cpu else None
            for out, left, right in zip(outs, lefts, rights, strict=True):
                add_product(out, left, right, scratch)
        else:
            for out, left, right in zip(outs, lefts, rights, strict=True):
                torch.mm(left, right, out=out)

    def write_sum(self, expert: int, value: Tensor) -> None:
        """Put `value` into the expert's gradient, or add it."""
        if self.accumulate:
            self._of_expert[expert].add_(value)
        else:
            self._of_expert[expert].copy_(value)

    def zero(self, experts: Sequence[int]) -> None:
        """Complete the gradients of experts that get no product."""
        if not self.accumulate:
            for expert in experts:
                self._of_expert[expert].zero_()


@final
class GradBuffers:
    """The kept memory of one module's weight gradients, by the weights' names in it.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[ReferenceType[Tensor], Tensor]] = {}

    def __reduce__(self) -> tuple[type["GradBuffers"], tuple[()]]:
        """Memory belongs to one process and one module."""
        return (GradBuffers, ())

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether `weight` is a trained leaf whose `grad` is missing or plain, in its own dtype."""
        if not (weight.is_leaf and weight.requires_grad):
            return False
        grad = weight.grad
        return grad is None or (grad.layout == torch.strided and grad.dtype == weight.dtype)

    def target(self, name: str, weight: Tensor) -> GradTarget:
        """The `grad` of a weight that is served, made if it is missing."""
        if weight.grad is not None:
            return GradTarget(weight.grad, True)
        owner, kept = self._kept.get(name, (None, None))
        if kept is None or owner is None or owner() is not weight or not _like(kept, weight):
            kept = torch.empty_like(weight, requires_grad=False)
            self._kept[name] = (ref(weight), kept)
        weight.grad = kept
        return GradTarget(kept, False)


def _like(kept: Tensor, weight: Tensor) -> bool:
    """False after the weight was moved, converted or laid out anew."""
    return (kept.shape, kept.stride(), kept.dtype, kept.device) == (
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.device,
    )

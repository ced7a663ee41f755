"""Give weights gradients that were computed outside of autograd, as autograd would have.

deliver([weight], [gradient])               # added to weight.grad; hooks called
ready = Ready()
ready.add(weight, gradient)                 # soon, together with others
ready.deliver()
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from moe_pipeline._torch_private import run_backward

# Of small weights, whose gradients wait for each other until they are delivered.
_TOGETHER_BYTES = 8 << 20


@final
class Ready:
    """Gradients that are to be delivered together: each run of the engine costs some Python."""

    def __init__(self) -> None:
        self._leaves: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._num_bytes = 0

    def add(self, leaf: Tensor, gradient: Tensor) -> None:
        """Deliver soon; what is large, at once."""
        if any(leaf is other for other in self._leaves):  # its hooks are called for each gradient
            self.deliver()
        self._leaves.append(leaf)
        self._gradients.append(gradient)
        self._num_bytes += gradient.nbytes
        del gradient
        if self._num_bytes >= _TOGETHER_BYTES:
            self.deliver()

    def deliver(self) -> None:
        """Deliver what has been added."""
        leaves, self._leaves, self._num_bytes = self._leaves, [], 0
        try:
            deliver(leaves, self._gradients)
        except Exception as error:
            told = ", ".join(f"shape {tuple(leaf.shape)} in {leaf.dtype}" for leaf in leaves)
            error.add_note(f"in deferred gradients, delivered to weights of {told}")
            raise


def deliver(
    leaves: Sequence[Tensor],
    gradients: list[Tensor],
    *,
    before: Callable[[Tensor], object] | None = None,
) -> None:
    """Give leaves their gradients as autograd does, hooks included; empties the list.

    `before` is called with the root of the graph that does it.

    A gradient that nobody else holds becomes `leaf.grad` without a copy. A leaf that was frozen
    since its forward gets none.
    """
    boxes = [[gradient] for gradient in gradients]
    gradients.clear()
    given = [pair for pair in zip(leaves, boxes, strict=True) if pair[0].requires_grad]
    del boxes
    if not given:
        return
    with torch.enable_grad():
        root = _Delivery.apply([box for _, box in given], *(leaf for leaf, _ in given))
    if before is not None:
        before(root)
    # Not torch's own function, which compares shapes first: this runs in every W.
    ones = torch.ones_like(root)
    run_backward((root,), (ones,), retain_graph=False, create_graph=False, inputs=())


@final
class _Delivery(torch.autograd.Function):
    """Its backward makes the gradients in the boxes those of the leaves."""

    @staticmethod
    def forward(ctx: Any, boxes: list[list[Tensor]], *leaves: Tensor) -> Tensor:
        ctx.boxes = boxes
        return leaves[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[box.pop() for box in ctx.boxes]

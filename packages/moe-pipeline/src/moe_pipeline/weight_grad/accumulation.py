"""How the gradient of a weight is accumulated: through autograd, or added in place to its `grad`.

Autograd makes each gradient as a tensor of its own and adds it to `grad` afterwards: a pass over
twice the weight's memory, and for the largest weight a peak of its size. A matrix product can add
to its result instead. Who may do that is given an `InPlaceAccumulation`; None is autograd's way.

    accumulation = InPlaceAccumulation()
    target = accumulation.target(weight)         # in a backward; None: leave it to autograd
    if target is not None:
        add_product(target.grad, grad_y.t(), x)

What is lost is the gradient of one backward by itself, which hooks get. So a weight with hooks, or
to whose accumulation somebody listens (DDP), keeps autograd's way (`is_observed`). Gradients differ
from autograd's in their last bits: a product that adds itself rounds once, autograd rounds twice.
"""

from collections.abc import Sequence
from typing import Any, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from moe_pipeline._torch_private import FakeTensor, has_hooks

# Not other subclasses, which may be made of several tensors.
PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)
# Of a factor: on a CPU a product of fewer, made in memory that stays in the cache and then added,
# takes less time than one that adds itself.
_FEW_ROWS = 128
_HAVE_KEPT_MEMORY = WeakTensorKeyDictionary()  # leaves, for `reuses_grad`


@final
class GradTarget:
    """Where the products of stacked weights are put: a gradient [E, ...].

    Attributes:
        grad: the whole gradient.
        accumulate: products are added to what is there; False: it holds nothing yet.
        returned: what the backward returns: the gradient, or None if it is the weight's `grad`.
    """

    def __init__(self, grad: Tensor, accumulate: bool, *, in_place: bool = True) -> None:
        self.grad = grad
        self.accumulate = accumulate
        self.returned = None if in_place else grad
        self._of_expert: tuple[Tensor, ...] = ()

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Of each expert; only made where it is asked for."""
        self._of_expert = self._of_expert or self.grad.unbind()
        return self._of_expert

    @property
    def mT(self) -> "GradTarget":
        """The same gradient for a function that works with the transposed weight."""
        return GradTarget(self.grad.mT, self.accumulate)

    def write(
        self, experts: Sequence[int], lefts: Sequence[Tensor], rights: Sequence[Tensor]
    ) -> None:
        """Put `left @ right` into each expert's gradient, or add it."""
        outs = [self._parts[expert] for expert in experts]
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
            self._parts[expert].add_(value)
        else:
            self._parts[expert].copy_(value)

    def zero(self, experts: Sequence[int]) -> None:
        """Complete the gradients of experts that get no product."""
        if not self.accumulate:
            for expert in experts:
                self._parts[expert].zero_()


@final
class InPlaceAccumulation:
    """Products are added straight to the `grad` of weights that nobody observes.

    Args:
        keeps_memory: also make a `grad` that is missing, in memory that outlives `zero_grad`:
            making fresh memory for the gradients of many experts with few rows each can cost as
            much as the products that fill it. The next backward then writes into the memory of the
            gradient before: clone a gradient that is to be kept.

    Copies and pickles share no memory with the original.
    """

    @staticmethod
    def reuses_grad(leaf: Tensor) -> bool:
        """Whether a backward that finds no `grad` may write where the one before it lies."""
        return leaf in _HAVE_KEPT_MEMORY

    def __init__(self, *, keeps_memory: bool = False) -> None:
        self._keeps_memory = keeps_memory
        self._kept: dict[int, tuple[ReferenceType[Tensor], Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Memory belongs to one process and one module."""
        return {"_keeps_memory": self._keeps_memory, "_kept": {}}

    def target(self, leaf: Tensor) -> GradTarget | None:
        """The `grad` of a leaf that is not observed; None: its gradient goes through autograd."""
        if leaf.grad is not None:
            grad = open_grad(leaf)
            return None if grad is None else GradTarget(grad, True)
        trained = leaf.requires_grad and leaf.grad_dtype in (None, leaf.dtype)
        if not (self._keeps_memory and trained):
            return None
        owner, kept = self._kept.get(id(leaf), (None, None))
        if kept is None or owner is None or owner() is not leaf or not _is_like(kept, leaf):
            self._kept = {k: entry for k, entry in self._kept.items() if entry[0]() is not None}
            kept = torch.empty_like(leaf, requires_grad=False)
            self._kept[id(leaf)] = (ref(leaf), kept)
            _HAVE_KEPT_MEMORY[leaf] = True
        leaf.grad = kept
        return GradTarget(kept, False)


def open_grad(leaf: Tensor) -> Tensor | None:
    """The `grad` of a trained leaf if there is one, plain and laid out as the leaf; else None."""
    grad = leaf.grad if leaf.requires_grad else None
    if grad is None or type(grad) not in PLAIN_TYPES or grad.layout != torch.strided:
        return None
    return grad if _is_like(grad, leaf) else None


def fits(grad: Tensor, *factors: Tensor) -> bool:
    """Whether products of these have the gradient's dtype; under autocast they have another."""
    return all(factor.dtype == grad.dtype for factor in factors)


def add_product(to: Tensor, left: Tensor, right: Tensor, scratch: Tensor | None = None) -> None:
    """`to += left @ right`, for [N, R] and [R, K] in the dtype of `to`.

    `scratch`: [N, K] to work in; use one for all products of that shape.
    """
    if to.device.type == "cpu" and len(right) < _FEW_ROWS:
        to.add_(torch.mm(left, right, out=scratch))
    else:
        to.addmm_(left, right)


def product(left: Tensor, right: Tensor, to: Tensor | None) -> Tensor | None:
    """`left @ right`; added to `to` if that is given, and then None."""
    if to is None:
        return left @ right
    add_product(to, left, right)
    return None


def is_observed(leaf: Tensor) -> bool:
    """Whether somebody is told of the leaf's gradients: by hooks on it, or on its accumulation.

    Hooks of the latter kind cannot be listed. But whoever has one keeps the node that accumulates
    alive, which torch else makes anew each time that it is asked for.
    """
    if has_hooks(leaf):
        return True
    mark = "moe_pipeline.weight_grad.accumulation"
    _notes_of_accumulation(leaf)[mark] = True
    return mark in _notes_of_accumulation(leaf)


def _notes_of_accumulation(leaf: Tensor) -> dict[str, Any]:
    """What anybody has noted on the node that accumulates the leaf's gradient."""
    node: Any = node_of_leaf(leaf)
    notes: dict[str, Any] = node.metadata
    return notes


def node_of_leaf(leaf: Tensor) -> Node:
    """The node that accumulates a leaf's gradient."""
    with torch.enable_grad():
        view: Any = leaf.expand_as(leaf)  # by hand: `get_gradient_edge` takes four times as long
    node: Node = view.grad_fn.next_functions[0][0]
    return node


def _is_like(grad: Tensor, leaf: Tensor) -> bool:
    """False also after the leaf was moved, converted or laid out anew."""
    return (grad.shape, grad.stride(), grad.dtype, grad.device) == (
        leaf.shape,
        leaf.stride(),
        leaf.dtype,
        leaf.device,
    )

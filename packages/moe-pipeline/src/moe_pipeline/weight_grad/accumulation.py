"""When a product may be added straight into a weight's `grad`, and nobody can tell the difference.

Autograd makes each gradient as a tensor of its own and adds it to `grad` afterwards: a pass over
twice the weight's memory, and for the largest weight a peak of its size. A matrix product can add
to its result instead. What is lost is the gradient of one backward by itself, which hooks get; so a
weight that has any, or to whose accumulation somebody listens (DDP, FSDP), is left alone.

    grad = open_grad(weight)
    if grad is not None and fits(grad, left, right):
        add_product(grad, left.t(), right)

Gradients differ from autograd's in their last bits: a product that adds itself rounds once where
autograd rounds twice.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from moe_pipeline._torch_private import has_hooks

# Not subclasses, which may be made of several tensors.
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Of a factor: on a CPU a product of fewer, made in memory that stays in the cache and then added,
# takes less time than one that adds itself.
_FEW_ROWS = 128


def open_grad(leaf: Tensor) -> Tensor | None:
    """The `grad` of a trained leaf if there is one, plain and laid out as the leaf; else None."""
    grad = leaf.grad if leaf.requires_grad else None
    if grad is None or type(grad) not in PLAIN_TYPES or grad.layout != torch.strided:
        return None
    is_alike = (grad.dtype, grad.device, grad.stride()) == (leaf.dtype, leaf.device, leaf.stride())
    return grad if is_alike else None


def fits(grad: Tensor, *factors: Tensor) -> bool:
    """Whether products of these have the gradient's dtype; under autocast they have another."""
    return all(factor.dtype == grad.dtype for factor in factors)


def add_product(to: Tensor, left: Tensor, right: Tensor, scratch: Tensor | None = None) -> None:
    """`to += left @ right`, for [N, R] and [R, K] in the dtype of `to`.

    Args:
        to: [N, K].
        left: [N, R].
        right: [R, K].
        scratch: [N, K] to work in; use one for all products of that shape.
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
    with torch.enable_grad():
        notes: Any = get_gradient_edge(leaf).node.metadata  # declared as a method, and is none
    return cast(dict[str, Any], notes)

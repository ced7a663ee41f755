"""Addends to values, in an order that does not depend on who sent what.

The values of the last axis are reduced first, along each axis in the order of its indices, so that
the same addends give the same bits on every rank that wants them.

    reduced(addends, Reduction(kinds=("sum",), sizes=(4,)))    # addends[0] + addends[1] + ...
"""

import torch

from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout import TensorSpec
from mesh_spmd.reshard.moves import Reduction


def reduced(addends: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the value of `addends`, stacked along a first dim in row-major order; overwrites them.

    The value is a view of the addends, so that nothing is allocated.
    """
    values = addends.view((*reduction.sizes, *addends.shape[1:]))
    for axis in reversed(range(len(reduction.sizes))):
        values = _along(values, axis, reduction.kinds[axis])
    return values


def identity_of(target: TensorSpec, rank: int, *, kept: tuple[str, ...]) -> int | None:
    """Return what `rank` holds of a partial sum or product whose value stands on other ranks.

    None where it holds the value: on the first index of these axes. On `kept` axes the values were
    partial before, and each rank has its own.
    """
    at = target.mesh.coordinate(rank)
    one = 1  # of a kept sum, whose addends are to make 1, the first has it
    # The innermost axis decides: it is reduced first, to what the axes around it need.
    for axis, kind in reversed(target.partials.items()):
        if axis in kept:
            one = 0 if kind == "sum" and at[axis] else one
        elif at[axis] and kind in ("sum", "product"):
            return 0 if kind == "sum" else one
    return None


def _along(values: torch.Tensor, axis: int, kind: str) -> torch.Tensor:
    result, *others = values.unbind(axis)
    for other in others:
        if kind in ("sum", "avg"):
            result += other
        elif kind == "product":
            result *= other
        elif kind == "max":
            torch.maximum(result, other, out=result)
        elif kind == "min":
            torch.minimum(result, other, out=result)
        elif kind == "any":
            result |= other
        elif kind == "all":
            result &= other
        else:
            raise MeshValueError(f"no reduction is known for Partial({kind!r})")
    return result.div_(values.shape[axis]) if kind == "avg" else result

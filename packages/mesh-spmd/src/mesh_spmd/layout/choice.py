"""Choose placements that cut a tensor evenly, with fewer axes where the sizes do not divide.

A layout rule ("experts over ep, and over dp too") meets tensors whose sizes do not divide by all of
its axes. Uneven shards would be correct but cost padding and imbalance in every collective.

Invariant: every shard of the result has the same shape, and no larger product of the wanted axes
would divide. The rule is that of Paddle (largest mesh axis that divides), extended from one axis to
combinations of axes.

    mesh = ProcessMesh((2, 4), ("dp", "ep"))
    choose_placements((64, 512), mesh, shard={"dp": 0, "ep": 0})   # (Shard(0), Shard(0))
    choose_placements((60, 512), mesh, shard={"dp": 0, "ep": 0})   # (Replicate(), Shard(0))
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from typing import SupportsIndex

from torch.distributed.tensor import Placement, Replicate, Shard

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout.spec import resolved_dim
from mesh_spmd.mesh import ProcessMesh


def choose_placements(
    global_shape: Sequence[SupportsIndex],
    mesh: ProcessMesh,
    *,
    shard: Mapping[str, int],
    strict: bool = False,
) -> tuple[Placement, ...]:
    """Return one placement for each mesh axis: the wanted shards where they cut evenly.

    For each tensor dim: when its size divides by the product of all axes wanted for it, all of them
    shard it. Otherwise the combination of those axes with the largest product that divides does
    (of equal products: the fewest axes, then the innermost, whose ranks are neighbours), and the
    others replicate. Axes that `shard` does not name replicate. A dim of size 0 divides by
    everything, and an axis of size 1 always shards. Not collective.

    Args:
        global_shape: sizes of the whole tensor.
        mesh: the mesh.
        shard: the tensor dim that each axis should shard; negative dims count from the last.
        strict: raise instead of falling back.

    Raises:
        MeshTypeError: `global_shape` or `shard` does not hold integers, or `mesh` is no mesh.
        MeshValueError: an axis is unknown or a dim is out of range; or, with `strict`, a size does
            not divide.
    """
    sizes = checked_sizes(global_shape, what="global_shape", smallest_size=0)
    check_kind(mesh, ProcessMesh, "mesh must be a ProcessMesh")
    check_kind(shard, Mapping, "shard must map axes to tensor dims")
    axes = mesh.sorted_axes(tuple(shard)) if shard else ()
    dim_of = {axis: resolved_dim(shard[axis], len(sizes), axis) for axis in axes}
    kept: set[str] = set()
    for dim in sorted(set(dim_of.values())):
        wanted = tuple(axis for axis in dim_of if dim_of[axis] == dim)
        chosen = _largest_that_divides(sizes[dim], mesh, wanted)
        if strict and chosen != wanted:
            raise MeshValueError(_strict_message(sizes, dim, mesh, wanted, chosen))
        kept.update(chosen)
    return tuple(Shard(dim_of[axis]) if axis in kept else Replicate() for axis in mesh.axis_names)


def _largest_that_divides(size: int, mesh: ProcessMesh, wanted: tuple[str, ...]) -> tuple[str, ...]:
    trivial = [axis for axis in wanted if mesh.axis_size(axis) == 1]
    others = [axis for axis in wanted if mesh.axis_size(axis) > 1]
    candidates = chain.from_iterable(
        combinations(others, count) for count in range(len(others) + 1)
    )
    best = max(
        (axes for axes in candidates if size % _product(mesh, axes) == 0),
        key=lambda axes: (
            _product(mesh, axes),
            -len(axes),
            sorted(map(mesh.axis_index, axes), reverse=True),
        ),
    )
    return tuple(axis for axis in wanted if axis in best or axis in trivial)


def _product(mesh: ProcessMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.axis_size(axis) for axis in axes)


def _strict_message(
    sizes: tuple[int, ...],
    dim: int,
    mesh: ProcessMesh,
    wanted: tuple[str, ...],
    chosen: tuple[str, ...],
) -> str:
    axes = " x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in wanted)
    parts = _product(mesh, wanted)
    nearest = max(parts, -(-sizes[dim] // parts) * parts)
    rest = f"shard over {', '.join(chosen)} only" if chosen else "replicate it"
    return (
        f"dim {dim} of global_shape={sizes} is {sizes[dim]}, which does not divide by {axes} = "
        f"{parts}; make it a multiple of {parts} (for example {nearest}), or {rest} (strict=False)"
    )

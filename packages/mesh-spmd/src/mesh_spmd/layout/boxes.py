"""Which box of a global tensor each rank holds, for any shape and any placements.

Checkpoints, resharding and parameter initialisation all ask this question, and most errors in them
are uneven or empty shards. The answer here is pure arithmetic on a `Spec`; no process is needed.

Invariant: the boxes are those of torch's DTensor. A dim of n elements over p ranks is cut as
`torch.chunk` cuts it: ceil(n / p) for each rank until none are left, so trailing ranks may hold a
shorter or an empty box. Several axes on one dim nest in mesh order, or in the spec's `order`: the
second axis cuts each piece of the first. (That is not the cut of the flattened axes, unless the
sizes are even.) An axis with `sizes` in the spec is cut into just these.

    spec = Spec.from_axes(ProcessMesh((4,), ("ep",)), {"ep": Shard(0)})
    local_box((6, 512), spec, rank=2)  # Box(offset=(4, 0), shape=(2, 512))
    local_box((6, 512), spec, rank=3)  # Box(offset=(6, 0), shape=(0, 512))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import SupportsIndex, final

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout.cuts import cut_bounds
from mesh_spmd.layout.spec import Spec


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a global tensor, in elements: where it begins and how long it is.

    A sharded dim of which nothing is held has length 0 and begins at the end of the global dim, as
    in torch.

    Raises:
        MeshTypeError: an offset or a length is not an integer.
        MeshValueError: an offset or a length is negative, or their numbers of dims differ.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        offset = checked_sizes(self.offset, what="box offset", smallest_size=0)
        shape = checked_sizes(self.shape, what="box shape", smallest_size=0)
        if len(offset) != len(shape):
            raise MeshValueError(
                f"box offset {offset} has {len(offset)} dims, but box shape {shape} has "
                f"{len(shape)}; give one offset and one length for each dim"
            )
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "shape", shape)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that takes the box out of the global tensor: `x[box.slices()]`."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def local_box(global_shape: Sequence[SupportsIndex], spec: Spec, rank: int) -> Box:
    """Return the box of a tensor that `rank` holds. Partial counts as replicated. Not collective.

    Args:
        global_shape: sizes of the whole tensor; zeros and scalars are allowed.
        spec: the mesh and the placements.
        rank: a global rank of the mesh.

    Raises:
        MeshTypeError: `global_shape` does not hold integers, or `spec` is not a Spec.
        MeshValueError: a size is negative, a placement shards a dim that the tensor lacks, or
            `rank` is not in the mesh.
    """
    sizes = checked_sizes(global_shape, what="global_shape", smallest_size=0)
    bounds, nesting = dim_bounds(sizes, spec), spec.nesting(len(sizes))
    return _box_at(sizes, spec, bounds, nesting, tuple(spec.mesh.coordinate(rank).values()))


def all_boxes(global_shape: Sequence[SupportsIndex], spec: Spec) -> dict[int, Box]:
    """Return the box of every rank of the mesh, by global rank, in mesh order. Not collective.

    Args:
        global_shape: sizes of the whole tensor; zeros and scalars are allowed.
        spec: the mesh and the placements.

    Raises:
        MeshTypeError: `global_shape` does not hold integers, or `spec` is not a Spec.
        MeshValueError: a size is negative, or a placement shards a dim that the tensor lacks.
    """
    sizes = checked_sizes(global_shape, what="global_shape", smallest_size=0)
    bounds, nesting = dim_bounds(sizes, spec), spec.nesting(len(sizes))
    coordinates = product(*(range(size) for size in spec.mesh.shape))
    return {
        rank: _box_at(sizes, spec, bounds, nesting, coordinate)
        for rank, coordinate in zip(spec.mesh.ranks, coordinates, strict=True)
    }


def dim_bounds(sizes: tuple[int, ...], spec: Spec) -> list[tuple[int, ...]]:
    """Return for each tensor dim the bounds of its pieces, in row-major order of the axes on it.

    Raises:
        MeshTypeError: `spec` is not a Spec.
        MeshValueError: a placement shards a dim that the tensor lacks; or the ragged sizes of an
            axis do not add up to the piece that it cuts.
    """
    check_kind(spec, Spec, "spec must be a Spec")
    ragged = dict(spec.sizes)
    names, shape = spec.mesh.axis_names, spec.mesh.shape
    return [
        cut_bounds(size, tuple((shape[a], ragged.get(names[a])) for a in axes))
        for size, axes in zip(sizes, spec.nesting(len(sizes)), strict=True)
    ]


def _box_at(
    sizes: tuple[int, ...],
    spec: Spec,
    bounds: Sequence[tuple[int, ...]],
    nesting: Sequence[tuple[int, ...]],
    coordinate: tuple[int, ...],
) -> Box:
    offset, shape = [], []
    for size, bound, axes in zip(sizes, bounds, nesting, strict=True):
        piece = 0
        for axis_index in axes:
            piece = piece * spec.mesh.shape[axis_index] + coordinate[axis_index]
        length = bound[piece + 1] - bound[piece]
        shape.append(length)
        # As in torch, what is empty since others have it all begins at the end of its dim.
        offset.append(bound[piece] if length or not axes else size)
    return Box(tuple(offset), tuple(shape))

"""Which box of a global tensor each rank holds, for any shape and any placements.

Checkpoints, resharding and parameter initialisation all ask this question, and most errors in them
are uneven or empty shards. The answer here is pure arithmetic on a `Spec`; no process is needed.

Invariant: the boxes are those of torch's DTensor. A dim of n elements over p ranks is cut as
`torch.chunk` cuts it: ceil(n / p) for each rank until none are left, so trailing ranks may hold a
shorter or an empty box. Several axes on one dim nest in mesh order: the second axis cuts each piece
of the first. (That is not the cut of the flattened axes, unless the sizes are even.)

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


@dataclass(frozen=True, slots=True)
class _Cut:
    """One axis that shards: the tensor dim that it cuts, the mesh axis, and the number of parts."""

    dim: int
    axis_index: int
    num_parts: int


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
    cuts = _cuts(spec, len(sizes))
    return _box_at(sizes, cuts, tuple(spec.mesh.coordinate(rank).values()))


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
    cuts = _cuts(spec, len(sizes))
    coordinates = product(*(range(size) for size in spec.mesh.shape))
    return {
        rank: _box_at(sizes, cuts, coordinate)
        for rank, coordinate in zip(spec.mesh.ranks, coordinates, strict=True)
    }


def _cuts(spec: Spec, ndim: int) -> list[_Cut]:
    check_kind(spec, Spec, "spec must be a Spec")
    return [
        _Cut(dim, axis_index, spec.mesh.shape[axis_index])
        for axis_index, dim in enumerate(spec.sharded_dims(ndim))
        if dim is not None
    ]


def _box_at(sizes: tuple[int, ...], cuts: Sequence[_Cut], coordinate: tuple[int, ...]) -> Box:
    offset, shape = [0] * len(sizes), list(sizes)
    for cut in cuts:
        part = -(-shape[cut.dim] // cut.num_parts)
        start = min(part * coordinate[cut.axis_index], shape[cut.dim])
        offset[cut.dim] += start
        shape[cut.dim] = min(part, shape[cut.dim] - start)
    for cut in cuts:
        if shape[cut.dim] == 0:
            offset[cut.dim] = sizes[cut.dim]
    return Box(tuple(offset), tuple(shape))

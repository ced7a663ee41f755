"""A whole tensor as plain data: its shape, its dtype and how it lies on a mesh.

Plans count bytes and creation needs a dtype; `Spec` alone has neither.

    TensorSpec((64, 512), torch.bfloat16, Spec.from_axes(mesh, {"ep": Shard(0)}))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout.boxes import Box, dim_bounds, local_box
from mesh_spmd.layout.flat import FlatSpec
from mesh_spmd.layout.spec import Spec
from mesh_spmd.mesh import ProcessMesh

_MOST_BYTES = 1 << 63


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor. Immutable, hashable; it holds no data.

    Raises:
        MeshTypeError: `dtype` is no torch.dtype, `spec` is neither Spec nor FlatSpec, or `shape`
            does not hold integers.
        MeshValueError: a size is negative, a placement shards a dim that the tensor lacks, given
            sizes do not add up, or the tensor has more bytes than 64 bits count.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | FlatSpec

    def __post_init__(self) -> None:
        shape = checked_sizes(self.shape, what="shape of a TensorSpec", smallest_size=0)
        object.__setattr__(self, "shape", shape)
        check_kind(self.dtype, torch.dtype, "the dtype of a TensorSpec must be a torch.dtype")
        if not isinstance(self.spec, Spec | FlatSpec):
            raise MeshTypeError(
                f"the spec of a TensorSpec must be a Spec or a FlatSpec, got {self.spec!r}"
            )
        if max(math.prod(shape) * self.dtype.itemsize, *shape, 0) >= _MOST_BYTES:
            raise MeshValueError(f"a tensor of {shape} has more bytes than 64 bits count")
        bounds = dim_bounds(shape, self.boxes)
        if isinstance(self.spec, FlatSpec) and self.spec.sizes is not None:
            lengths = [{high - low for low, high in pairwise(b)} for b in bounds]
            for numel in {math.prod(box) for box in _products(lengths)}:
                self.spec.bounds(numel)

    @property
    def boxes(self) -> Spec:
        """The spec that gives the boxes: that of a FlatSpec, or the spec itself."""
        return self.spec.spec if isinstance(self.spec, FlatSpec) else self.spec

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh that the tensor lies on."""
        return self.spec.mesh

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def partials(self) -> dict[str, str]:
        """The kind of reduction that is still due, by axis."""
        placements = self.boxes.placements
        # Exact types, which a Spec has made sure of: torch answers isinstance slowly.
        if all(type(p) is Shard or type(p) is Replicate for p in placements):
            return {}
        pairs = zip(self.mesh.axis_names, placements, strict=True)
        return {axis: str(p.reduce_op) for axis, p in pairs if isinstance(p, Partial)}

    def reduced(self) -> TensorSpec:
        """Return the tensor after its reductions: each rank keeps its box, of whole values."""
        if not self.partials:
            return self
        spec = self.boxes
        pairs = zip(spec.mesh.axis_names, spec.placements, strict=True)
        whole: dict[str, Placement] = {
            axis: Replicate() if isinstance(p, Partial) else p for axis, p in pairs
        }
        boxes = Spec.from_axes(spec.mesh, whole, order=spec.order, sizes=dict(spec.sizes))
        flat = self.spec
        found = FlatSpec(boxes, flat.axes, flat.sizes) if isinstance(flat, FlatSpec) else boxes
        return TensorSpec(self.shape, self.dtype, found)

    def box(self, rank: int) -> Box:
        """Return the box that `rank` holds, or of which it holds a flat range.

        Raises:
            MeshValueError: `rank` is not in the mesh.
        """
        return local_box(self.shape, self.boxes, rank)

    def flat_range(self, rank: int) -> tuple[int, int]:
        """Return which row-major elements of its box `rank` holds: all, unless the spec is flat.

        Raises:
            MeshValueError: `rank` is not in the mesh.
        """
        numel = self.box(rank).numel
        if not isinstance(self.spec, FlatSpec):
            return 0, numel
        bounds = self.spec.bounds(numel)
        part = self.spec.part_of(tuple(self.mesh.coordinate(rank).values()))
        return bounds[part], bounds[part + 1]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of `rank`'s local tensor: of its box, or (elements,) of a flat range.

        Raises:
            MeshValueError: `rank` is not in the mesh.
        """
        if isinstance(self.spec, FlatSpec):
            begin, end = self.flat_range(rank)
            return (end - begin,)
        return self.box(rank).shape


def _products(lengths: list[set[int]]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for choices in lengths:
        found = [(*box, length) for box in found for length in sorted(choices)]
    return found

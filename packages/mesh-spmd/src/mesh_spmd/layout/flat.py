"""What sharded optimizer states hold: ranges of the row-major elements of a rank's box.

ZeRO stage 1 and flat FSDP parameters cut the elements of a model-parallel box evenly over dp,
without regard to rows. `FlatSpec` says so: the spec gives the box, `axes` cut its elements.

Invariant: the ranges of the ranks that share a box tile its elements, in row-major order of `axes`.

    experts = Spec.from_axes(mesh, {"ep": Shard(0)})
    FlatSpec(experts, ("dp",))                       # even, as torch.chunk cuts
    FlatSpec(experts, ("dp",), sizes=(100, 0, 28))   # padding and other parameters leave such parts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from torch.distributed.tensor import Replicate

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout.cuts import cut_bounds
from mesh_spmd.layout.spec import Spec
from mesh_spmd.mesh import ProcessMesh


@final
@dataclass(frozen=True, slots=True)
class FlatSpec:
    """A `Spec` whose boxes' row-major elements are cut over further axes. Immutable, hashable.

    Args:
        spec: gives the boxes; it replicates over `axes`.
        axes: the axes that cut the elements, outermost first.
        sizes: elements of each part, zeros allowed, adding up to the elements of every box; even
            parts as torch.chunk cuts when left out.

    Raises:
        MeshTypeError: `spec` is no Spec, or `sizes` does not hold integers.
        MeshValueError: an axis is unknown, named twice, or not replicated by `spec`; or there is
            not one size for each part.
    """

    spec: Spec
    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_kind(self.spec, Spec, "the spec of a FlatSpec must be a Spec")
        check_kind(self.axes, Iterable, "the axes of a FlatSpec must be a sequence of names")
        axes = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        self.spec.mesh.sorted_axes(axes)
        for axis in axes:
            if not isinstance(self.spec.placement(axis), Replicate):
                raise MeshValueError(
                    f"axis {axis!r} has {self.spec.placement(axis)!r} in the spec of a FlatSpec; "
                    "an axis that cuts the elements of a box must replicate the box"
                )
        object.__setattr__(self, "axes", axes)
        if self.sizes is not None:
            sizes = checked_sizes(self.sizes, what="sizes of a FlatSpec", smallest_size=0)
            if len(sizes) != self.num_parts:
                raise MeshValueError(
                    f"{len(sizes)} sizes were given for {self.num_parts} parts over "
                    f"{', '.join(axes)}; give one for each"
                )
            object.__setattr__(self, "sizes", sizes)

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh of the spec."""
        return self.spec.mesh

    @property
    def num_parts(self) -> int:
        """How many parts the elements of a box are cut into."""
        parts = 1
        for axis in self.axes:
            parts *= self.mesh.axis_size(axis)
        return parts

    def bounds(self, numel: int) -> tuple[int, ...]:
        """Return the bounds of the parts of a box of `numel` elements, one more than parts.

        Raises:
            MeshValueError: the given sizes do not add up to `numel`.
        """
        return cut_bounds(numel, ((self.num_parts, self.sizes),))

    def part_of(self, coordinate: Sequence[int]) -> int:
        """Return which part the rank at `coordinate` (an index for each axis) holds."""
        part = 0
        for axis in self.axes:
            part = part * self.mesh.axis_size(axis) + coordinate[self.mesh.axis_index(axis)]
        return part

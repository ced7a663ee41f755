"""How one tensor lies on a mesh: a mesh and one torch placement for each of its axes.

torch's own `DTensorSpec` is private and tied to a `DeviceMesh`; this one plans without processes.

    mesh = ProcessMesh((2, 4), ("pp", "ep"))
    Spec(mesh, (Replicate(), Shard(0)))
    Spec.from_axes(mesh, {"ep": Shard(0)})     # the same: other axes replicate
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex, final

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from mesh_spmd._checks import check_kind
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.mesh import ProcessMesh


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """A mesh and one placement for each of its axes, in mesh order. Immutable, hashable.

    Several axes may shard the same tensor dim; they nest in mesh order, the first axis outermost.
    `Shard(-1)` counts from the last dim of the tensor that the spec is applied to.

    Raises:
        MeshTypeError: a placement is not torch's Shard, Replicate or Partial. A strided shard is
            refused, since what a rank holds of it is not one box.
        MeshValueError: the number of placements is not the number of axes.
    """

    mesh: ProcessMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        check_kind(self.mesh, ProcessMesh, "the mesh of a Spec must be a ProcessMesh")
        check_kind(self.placements, Iterable, "placements must be a sequence")
        placements = tuple(self.placements)
        for placement in placements:
            _check_kind(placement)
        if len(placements) != len(self.mesh.axis_names):
            raise MeshValueError(
                f"{len(placements)} placements were given for {self.mesh!r}; give one for each of "
                f"its {len(self.mesh.axis_names)} axes, or name axes with Spec.from_axes"
            )
        object.__setattr__(self, "placements", placements)

    @classmethod
    def from_axes(cls, mesh: ProcessMesh, placements: Mapping[str, Placement]) -> Spec:
        """Return the spec with the placements named by axis; axes that are not named replicate.

        Raises:
            MeshTypeError: a placement is not torch's Shard, Replicate or Partial.
            MeshValueError: an axis is unknown.
        """
        check_kind(mesh, ProcessMesh, "the mesh of a Spec must be a ProcessMesh")
        check_kind(placements, Mapping, "placements must map axes to placements")
        for axis in placements:
            mesh.axis_index(axis)
        return cls(mesh, tuple(placements.get(axis, Replicate()) for axis in mesh.axis_names))

    def placement(self, axis: str) -> Placement:
        """Return the placement along `axis`.

        Raises:
            MeshValueError: the mesh has no such axis.
        """
        return self.placements[self.mesh.axis_index(axis)]

    def sharded_dims(self, ndim: int) -> tuple[int | None, ...]:
        """Return for each axis the tensor dim that it shards, None where it shards none.

        Args:
            ndim: number of dims of the tensor; negative dims count from it.

        Raises:
            MeshValueError: a Shard names a dim that a tensor of `ndim` dims lacks.
        """
        return tuple(
            resolved_dim(placement.dim, ndim, axis) if isinstance(placement, Shard) else None
            for axis, placement in zip(self.mesh.axis_names, self.placements, strict=True)
        )


def resolved_dim(dim: int, ndim: int, axis: str) -> int:
    """Return `dim` counted from the front, for a tensor of `ndim` dims that `axis` shards.

    Raises:
        MeshTypeError: `dim` is no integer.
        MeshValueError: `dim` is out of range.
    """
    check_kind(dim, SupportsIndex, f"the dim that axis {axis!r} shards must be an integer")
    if not -ndim <= dim < ndim:
        raise MeshValueError(
            f"axis {axis!r} shards dim {dim}, but the tensor has {ndim} dims; "
            + (f"give {-ndim} to {ndim - 1}" if ndim else "a scalar can only be replicated")
        )
    return dim % ndim


def _check_kind(placement: Placement) -> None:
    # The exact type, because a subclass of Shard may cut its dim in another way.
    if type(placement) in (Shard, Replicate) or isinstance(placement, Partial):
        return
    raise MeshTypeError(
        f"{placement!r} is not supported as a placement; give Shard(dim), Replicate() or "
        "Partial(), whose shards are boxes"
    )

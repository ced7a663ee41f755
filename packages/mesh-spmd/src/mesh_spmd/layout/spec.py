"""How one tensor lies on a mesh: a mesh and one torch placement for each of its axes.

torch's own `DTensorSpec` is private and tied to a `DeviceMesh`; this one plans without processes.

    mesh = ProcessMesh((2, 4), ("pp", "ep"))
    Spec(mesh, (Replicate(), Shard(0)))
    Spec.from_axes(mesh, {"ep": Shard(0)})     # the same: other axes replicate
    Spec.from_axes(mesh, {"ep": Shard(0)}, sizes={"ep": (20, 0, 4, 40)})    # ragged experts
    Spec.from_dims(mesh, [("ep", "pp"), None])                  # by tensor dim, ep outermost
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import SupportsIndex, final

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.mesh import ProcessMesh

PARTIAL_KINDS = ("sum", "avg", "max", "min", "product", "any", "all")


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """A mesh and one placement for each of its axes, in mesh order. Immutable, hashable.

    Several axes may shard the same tensor dim; they nest in mesh order, the first axis outermost,
    unless `order` says otherwise. `Shard(-1)` counts from the last dim of the tensor that the spec
    is applied to. With Partial on several axes, the values of the last axis are reduced first.

    Args:
        mesh: the mesh.
        placements: one for each axis, in mesh order. A Partial is of one of `PARTIAL_KINDS`.
        order: axes from the outermost to the innermost; those that are left out follow in mesh
            order. It matters where several axes shard one dim.
        sizes: the parts of an axis that shards, by axis: how many elements each index of the axis
            holds, zeros allowed. They add up to the dim, or to each piece that outer axes leave.

    Raises:
        MeshTypeError: a placement is not torch's Shard, Replicate or Partial. A strided shard is
            refused, since what a rank holds of it is not one box.
        MeshValueError: the number of placements is not the number of axes; a Partial is of an
            unknown kind; `order` or `sizes` name an unknown axis or one twice; or `sizes` are
            given for an axis that does not shard, or not one for each index.
    """

    mesh: ProcessMesh
    placements: tuple[Placement, ...]
    order: tuple[str, ...] = ()
    sizes: tuple[tuple[str, tuple[int, ...]], ...] | Mapping[str, Iterable[SupportsIndex]] = ()

    def __post_init__(self) -> None:
        check_kind(self.mesh, ProcessMesh, "the mesh of a Spec must be a ProcessMesh")
        check_kind(self.placements, Iterable, "placements must be a sequence")
        check_kind(self.sizes, Mapping | tuple, "sizes must map axes to the sizes of their parts")
        placements = tuple(self.placements)
        for placement in placements:
            _check_kind(placement)
        if len(placements) != len(self.mesh.axis_names):
            raise MeshValueError(
                f"{len(placements)} placements were given for {self.mesh!r}; give one for each of "
                f"its {len(self.mesh.axis_names)} axes, or name axes with Spec.from_axes"
            )
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "order", _checked_order(self.mesh, placements, self.order))
        object.__setattr__(self, "sizes", _checked_parts(self, _by_axis(self.sizes)))

    @classmethod
    def from_axes(
        cls,
        mesh: ProcessMesh,
        placements: Mapping[str, Placement],
        *,
        order: Iterable[str] = (),
        sizes: Mapping[str, Iterable[SupportsIndex]] | None = None,
    ) -> Spec:
        """Return the spec with the placements named by axis; axes that are not named replicate.

        Raises:
            MeshTypeError: a placement is not torch's Shard, Replicate or Partial.
            MeshValueError: an axis is unknown.
        """
        check_kind(mesh, ProcessMesh, "the mesh of a Spec must be a ProcessMesh")
        check_kind(placements, Mapping, "placements must map axes to placements")
        for axis in placements:
            mesh.axis_index(axis)
        in_order = tuple(placements.get(axis, Replicate()) for axis in mesh.axis_names)
        return cls(mesh, in_order, order, sizes or {})  # type: ignore[arg-type]

    @classmethod
    def from_dims(cls, mesh: ProcessMesh, dims: Iterable[str | Iterable[str] | None]) -> Spec:
        """Return the spec by tensor dim: for each dim the axis, or the axes from the outermost on.

        A dim of None, or of no axis, is not cut; axes that stand nowhere replicate.

        Raises:
            MeshTypeError: a dim has no axes and is not None, or an axis is not a string.
            MeshValueError: an axis is unknown, or stands twice.
        """
        check_kind(mesh, ProcessMesh, "the mesh of a Spec must be a ProcessMesh")
        check_kind(dims, Iterable, "dims must give the axes of each tensor dim")
        dims = list(dims)
        for dim in dims:
            check_kind(dim, Iterable | None, "a dim must give an axis, several axes or None")
        axes_of = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims]
        named = [axis for axes in axes_of for axis in axes]
        if named:
            mesh.sorted_axes(named)
        placements = {axis: Shard(dim) for dim, axes in enumerate(axes_of) for axis in axes}
        return cls.from_axes(mesh, placements, order=named)

    def dims_mapping(self, ndim: int) -> tuple[tuple[str, ...], ...]:
        """Return for each tensor dim the axes that cut it, outermost first: `from_dims` reversed.

        Raises:
            MeshValueError: a Shard names a dim that a tensor of `ndim` dims lacks.
        """
        return tuple(
            tuple(self.mesh.axis_names[index] for index in axes) for axes in self.nesting(ndim)
        )

    def nesting(self, ndim: int) -> tuple[tuple[int, ...], ...]:
        """Return for each tensor dim the indices of the axes that cut it, outermost first.

        Raises:
            MeshValueError: a Shard names a dim that a tensor of `ndim` dims lacks.
        """
        return _nesting(self, ndim)

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


@lru_cache(maxsize=1024)
def _nesting(spec: Spec, ndim: int) -> tuple[tuple[int, ...], ...]:
    names = spec.mesh.axis_names
    order = [*spec.order, *(axis for axis in names if axis not in spec.order)]
    dims = spec.sharded_dims(ndim)
    indices = [names.index(axis) for axis in order]
    return tuple(tuple(i for i in indices if dims[i] == dim) for dim in range(ndim))


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
    # Exact types: a subclass may cut its dim, or reduce, in another way (torch's masked partials).
    if type(placement) in (Shard, Replicate):
        return
    if type(placement) is not Partial:
        raise MeshTypeError(
            f"{placement!r} is not supported as a placement; give Shard(dim), Replicate() or "
            "Partial(), whose shards are boxes"
        )
    if placement.reduce_op not in PARTIAL_KINDS:
        raise MeshValueError(
            f"Partial({placement.reduce_op!r}) is of an unknown kind; give one of "
            f"{', '.join(PARTIAL_KINDS)}"
        )


def _checked_order(
    mesh: ProcessMesh, placements: Sequence[Placement], order: Iterable[str]
) -> tuple[str, ...]:
    """Return an order of all axes; none where it is that of the mesh.

    Only axes that may be on one dim change places, so that equal layouts are equal specs.
    """
    if isinstance(order, str) or not isinstance(order, Iterable):
        raise MeshTypeError(f"order must be a sequence of axes, got {order!r}")
    axes = tuple(order)
    if axes:
        mesh.sorted_axes(axes)
    rest = [axis for axis in mesh.axis_names if axis not in axes]
    whole = (*axes, *rest)
    if whole == mesh.axis_names:
        return ()
    dims = {a: p.dim for a, p in zip(mesh.axis_names, placements, strict=True) if type(p) is Shard}
    if len({dim < 0 for dim in dims.values()}) > 1:
        dims = dict.fromkeys(dims, 0)  # how many dims there are says which are the same
    nested = {dim: iter([a for a in whole if dims.get(a) == dim]) for dim in dims.values()}
    found = tuple(next(nested[dims[a]]) if a in dims else a for a in mesh.axis_names)
    return () if found == mesh.axis_names else found


def _by_axis(sizes: object) -> Mapping[str, Iterable[SupportsIndex]]:
    if isinstance(sizes, Mapping):
        return sizes
    pairs = [pair for pair in sizes if isinstance(pair, tuple) and len(pair) == 2]  # type: ignore[attr-defined]
    found = dict(pairs)
    if len(found) != len(sizes):  # type: ignore[arg-type]
        raise MeshValueError(
            "sizes must be pairs of an axis and the sizes of its parts, each axis once, got "
            f"{sizes!r}"
        )
    return found


def _checked_parts(
    spec: Spec, sizes: Mapping[str, Iterable[SupportsIndex]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    checked = []
    for axis in spec.mesh.sorted_axes(tuple(sizes)) if sizes else ():
        parts = checked_sizes(sizes[axis], what=f"sizes of axis {axis!r}", smallest_size=0)
        if not isinstance(spec.placement(axis), Shard):
            raise MeshValueError(
                f"sizes were given for axis {axis!r}, which has {spec.placement(axis)!r}; only an "
                "axis that shards has parts"
            )
        if len(parts) != spec.mesh.axis_size(axis):
            raise MeshValueError(
                f"{len(parts)} sizes were given for axis {axis!r} of size "
                f"{spec.mesh.axis_size(axis)}; give one for each index"
            )
        checked.append((axis, parts))
    return tuple(checked)

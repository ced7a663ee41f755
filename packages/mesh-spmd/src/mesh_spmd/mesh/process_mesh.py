"""The process mesh as pure data: layouts are planned, printed and tested without processes.

torch's `DeviceMesh` needs a process group for every question that is asked of it. A `ProcessMesh`
needs none: a laptop can answer where rank 4,095 of a cluster stands. Each converts into the other.

Invariant: `ranks` lists the global ranks in row-major order of `shape`, each rank once; the last
axis varies fastest. Two meshes with equal fields are equal and hash alike, on every rank.

    mesh = ProcessMesh((2, 4), ("pp", "ep"))
    mesh.coordinate(6)                 # {"pp": 1, "ep": 2}
    mesh.groups("ep")                  # [(0, 1, 2, 3), (4, 5, 6, 7)]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import SupportsIndex, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mesh_spmd._checks import RANKS_AT_MOST, check_kind, checked_sizes
from mesh_spmd.errors import MeshStateError, MeshTypeError, MeshValueError


@final
@dataclass(frozen=True, slots=True, init=False, repr=False)
class ProcessMesh:
    """A named n-dimensional arrangement of global ranks. Immutable, hashable, no process group.

    Args:
        shape: number of ranks along each axis, each at least 1.
        axis_names: one name an axis, all different, for example ("pp", "dp", "ep").
        ranks: the global ranks in row-major order; 0, 1, ... when left out.

    Raises:
        MeshTypeError: `shape` or `ranks` does not hold integers, or a name is not a string.
        MeshValueError: the lengths differ, an axis is empty, or a name or rank stands twice.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]
    _index_of: dict[int, int] = field(compare=False)
    _hash: int = field(compare=False)

    def __init__(
        self,
        shape: Sequence[SupportsIndex],
        axis_names: Sequence[str],
        ranks: Sequence[SupportsIndex] | None = None,
    ) -> None:
        checked_shape = checked_sizes(shape, what="mesh shape", smallest_size=1)
        names = _checked_names(axis_names)
        if not checked_shape or len(checked_shape) != len(names):
            raise MeshValueError(
                f"mesh shape {checked_shape} has {len(checked_shape)} axes, but axis_names {names} "
                f"has {len(names)}; give one name for each axis, and at least one axis"
            )
        size = math.prod(checked_shape)
        if size > RANKS_AT_MOST:
            raise MeshValueError(
                f"mesh shape {checked_shape} holds more than {RANKS_AT_MOST} ranks"
            )
        if ranks is None:
            checked_ranks = tuple(range(size))
        else:
            checked_ranks = checked_sizes(ranks, what="mesh ranks", smallest_size=0)
        index_of = {rank: index for index, rank in enumerate(checked_ranks)}
        if len(checked_ranks) != size or len(index_of) != size:
            raise MeshValueError(
                f"mesh shape {checked_shape} holds {size} ranks, but {len(checked_ranks)} were "
                f"given, {len(index_of)} of them different; give {size} different ranks"
            )
        object.__setattr__(self, "shape", checked_shape)
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "ranks", checked_ranks)
        object.__setattr__(self, "_index_of", index_of)
        # Of numbers only: a hash of names would be another one in the process that unpickles it.
        object.__setattr__(self, "_hash", hash((checked_shape, checked_ranks)))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.axis_names, self.shape, strict=True))
        natural = self.ranks == tuple(range(self.size))
        return f"ProcessMesh({axes})" if natural else f"ProcessMesh({axes}, ranks={self.ranks})"

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return len(self.ranks)

    def axis_index(self, axis: str) -> int:
        """Return the position of `axis` in `axis_names`.

        Raises:
            MeshValueError: the mesh has no such axis.
        """
        if axis not in self.axis_names:
            raise MeshValueError(
                f"unknown axis {axis!r}; this mesh has {', '.join(self.axis_names)}"
            )
        return self.axis_names.index(axis)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along `axis`.

        Raises:
            MeshValueError: the mesh has no such axis.
        """
        return self.shape[self.axis_index(axis)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return where global `rank` stands: its index along each axis, in mesh order.

        Raises:
            MeshValueError: `rank` is not in the mesh.
        """
        check_kind(rank, SupportsIndex, "rank must be an integer")
        rank = operator.index(rank)
        if rank not in self._index_of:
            raise MeshValueError(
                f"rank {rank} is not in {self!r}, which holds {self._known_ranks()}"
            )
        index = self._index_of[rank]
        return {
            axis: index // stride % size
            for axis, stride, size in zip(self.axis_names, self._strides(), self.shape, strict=True)
        }

    def position(self, rank: int) -> int | None:
        """Return where global `rank` stands in `ranks`; None if the mesh does not hold it."""
        return self._index_of.get(rank)

    def rank_at(self, **coordinate: int) -> int:
        """Return the global rank at a coordinate that names every axis: `rank_at(pp=1, ep=2)`.

        Raises:
            MeshValueError: an axis is missing or unknown, or an index is outside its axis.
        """
        missing = [axis for axis in self.axis_names if axis not in coordinate]
        if missing:
            raise MeshValueError(
                f"rank_at needs an index for every axis of {self!r}; {', '.join(missing)} missing"
            )
        return self.ranks[self._flat_index(coordinate)]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """List the rank lists of every group that varies along `axes`, all other axes fixed.

        The groups stand in row-major order of the fixed axes. Inside a group the ranks stand in
        row-major order of the mesh, whatever the order of `axes`, so that the position in the list
        is the rank inside the process group that `axis_group` returns.

        Raises:
            MeshValueError: no axis, an unknown axis, or the same axis twice.
        """
        varying = self.sorted_axes(axes)
        fixed = tuple(axis for axis in self.axis_names if axis not in varying)
        moves = self._flat_offsets(varying)
        return [
            tuple(self.ranks[base + move] for move in moves) for base in self._flat_offsets(fixed)
        ]

    def submesh(self, *axes: str, of: int | Mapping[str, int]) -> ProcessMesh:
        """Return the mesh that keeps `axes`, in the order given, and fixes all others.

        Args:
            axes: the axes to keep; at least one.
            of: a global rank, whose indices fix the other axes; or the index of each other axis.

        Raises:
            MeshValueError: an axis is unknown, named twice, or neither kept nor fixed; or the rank
                or an index is outside the mesh.
        """
        self.sorted_axes(axes)
        if isinstance(of, Mapping):
            self._check_fixes_the_rest(axes, of)
            fixed = dict(of)
        else:
            fixed = {a: i for a, i in self.coordinate(of).items() if a not in axes}
        base = self._flat_index(fixed)
        return ProcessMesh(
            tuple(self.axis_size(axis) for axis in axes),
            axes,
            tuple(self.ranks[base + move] for move in self._flat_offsets(axes)),
        )

    def sorted_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return `axes` in mesh order.

        Raises:
            MeshValueError: no axis, an unknown axis, or the same axis twice.
        """
        for axis in axes:
            check_kind(axis, str, "an axis must be given by its name")
        if not axes or len(set(axes)) != len(axes):
            raise MeshValueError(
                f"got axes {tuple(axes)}; name one or more of {', '.join(self.axis_names)}, "
                "each once"
            )
        return tuple(sorted(axes, key=self.axis_index))

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """Create torch's `DeviceMesh` of this mesh: one process group along each axis.

        Collective: every rank of the default process group must call it with an equal mesh, also
        the ranks outside the mesh. The default process group must exist already; it is never
        created here. Along each axis the rank inside the group is the index along the axis.

        Args:
            device_type: "cpu", "cuda", ... without an index.

        Raises:
            MeshValueError: the mesh names ranks that the default group lacks, the ranks do not
                ascend along an axis (torch numbers a group's ranks in ascending order), or
                `device_type` carries an index.
            MeshStateError: there is no default process group.
        """
        check_kind(device_type, str, "device_type must be a string")
        if not device_type.isidentifier():
            raise MeshValueError(
                f"device_type {device_type!r} is not a device type; give 'cpu' or 'cuda', no index"
            )
        if not dist.is_initialized():
            raise MeshStateError(
                f"{self!r} cannot become a DeviceMesh without a process group; "
                "call torch.distributed.init_process_group first"
            )
        world_size = dist.get_world_size()
        if max(self.ranks) >= world_size:
            raise MeshValueError(
                f"{self!r} names rank {max(self.ranks)}, but the default process group has "
                f"{world_size} ranks; launch {max(self.ranks) + 1} or shrink an axis"
            )
        for axis in self.axis_names:
            self.check_ascending(axis)
        return DeviceMesh(
            device_type,
            torch.tensor(self.ranks, dtype=torch.int).view(self.shape),
            mesh_dim_names=self.axis_names,
        )

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> ProcessMesh:
        """Return the mesh of a `DeviceMesh` or of a slice of one. Not collective.

        A slice (`device_mesh["ep"]`) gives the ranks of the calling rank's own slice.

        Raises:
            MeshValueError: the device mesh has no axis names.
        """
        check_kind(device_mesh, DeviceMesh, "from_device_mesh needs torch's DeviceMesh")
        names = device_mesh.mesh_dim_names
        if names is None:
            raise MeshValueError(
                f"a DeviceMesh of shape {tuple(device_mesh.shape)} without axis names was given; "
                "create it with mesh_dim_names=('pp', 'ep') or the like"
            )
        return cls(tuple(device_mesh.shape), names, device_mesh.mesh.flatten().tolist())

    def check_ascending(self, *axes: str) -> None:
        """Raise unless the ranks of each group along `axes` ascend, as torch numbers them.

        Raises:
            MeshValueError: the rank inside a torch group would not be the position in the mesh.
        """
        for group in self.groups(*axes):
            if any(here > after for here, after in pairwise(group)):
                raise MeshValueError(
                    f"the ranks {group} along {', '.join(axes)} do not ascend, and torch numbers "
                    f"the ranks of a group in ascending order; reorder the ranks of {self!r}"
                )

    def _strides(self) -> list[int]:
        return [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]

    def _flat_index(self, coordinate: Mapping[str, int]) -> int:
        index = 0
        strides = self._strides()
        for axis, position in coordinate.items():
            size = self.axis_size(axis)
            check_kind(position, SupportsIndex, f"the index along axis {axis!r} must be an integer")
            if not 0 <= position < size:
                raise MeshValueError(
                    f"index {position} is outside axis {axis!r} of size {size}; "
                    f"give 0 to {size - 1}"
                )
            index += position * strides[self.axis_index(axis)]
        return index

    def _flat_offsets(self, axes: Sequence[str]) -> list[int]:
        strides = self._strides()
        steps = [
            range(0, strides[i] * self.shape[i], strides[i]) for i in map(self.axis_index, axes)
        ]
        return [sum(step) for step in product(*steps)]

    def _check_fixes_the_rest(self, axes: Sequence[str], fixed: Mapping[str, int]) -> None:
        rest = [axis for axis in self.axis_names if axis not in axes]
        if set(fixed) != set(rest):
            raise MeshValueError(
                f"a submesh along {', '.join(axes)} of {self!r} needs an index for exactly "
                f"the axes ({', '.join(rest)}), but ({', '.join(fixed)}) was given"
            )

    def _known_ranks(self) -> str:
        lowest, highest = min(self.ranks), max(self.ranks)
        if highest - lowest + 1 == self.size:
            return f"ranks {lowest} to {highest}"
        return f"ranks {', '.join(map(str, sorted(self.ranks)))}"


def _checked_names(axis_names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(axis_names, str):
        raise MeshTypeError(
            f"axis_names must be a sequence of names, got the string {axis_names!r}; "
            f"write ({axis_names!r},) for one axis"
        )
    check_kind(axis_names, Iterable, "axis_names must be a sequence of names")
    names = tuple(axis_names)
    if not all(isinstance(name, str) and name for name in names):
        raise MeshTypeError(f"axis_names must hold non-empty strings, got {names!r}")
    if len(set(names)) != len(names):
        raise MeshValueError(f"axis_names {names} holds a name twice; name each axis differently")
    return names

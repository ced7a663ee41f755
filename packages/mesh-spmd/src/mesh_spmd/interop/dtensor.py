"""Where torch's DTensor and a `TensorSpec` say the same of a tensor, and what only one can say.

What FSDP2 makes of a tensor that tensor parallelism has cut (torch's strided shards) is here an
`order` of axes. Ragged parts and flat ranges have no DTensor.

    local, spec = from_dtensor(weight)              # plan with it, save it, count its bytes
    weight = redistribute(weight, wider_spec)       # no more bytes than the layouts need
    weight = to_dtensor(local, spec, device_mesh)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from mesh_spmd._checks import check_kind
from mesh_spmd._torch_private import axes_of_dims, split_factor, strided_shard
from mesh_spmd.errors import MeshTypeError, MeshValueError
from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard import Exchange, reshard_tensor


def tensor_spec_of(dtensor: DTensor) -> TensorSpec:
    """Return shape, dtype and layout of a DTensor. Not collective.

    Raises:
        MeshTypeError: this is no DTensor, or has a placement whose shards are no boxes.
        MeshValueError: its mesh has no axis names, or strided shards cut a dim unevenly.
    """
    check_kind(dtensor, DTensor, "tensor_spec_of needs torch's DTensor")
    mesh = ProcessMesh.from_device_mesh(dtensor.device_mesh)
    factors = [split_factor(p) for p in dtensor.placements]
    placements = tuple(
        p if factor is None else Shard(factor[0])
        for p, factor in zip(dtensor.placements, factors, strict=True)
    )
    shape = tuple(dtensor.shape)
    plain = Spec(mesh, placements)
    nesting = plain.nesting(len(shape))
    if any(factors):
        strides = [1 if factor is None else factor[1] for factor in factors]
        orders = [_order_of(axes, strides, plain) for axes in nesting]
        for dim, axes in enumerate(nesting):
            if any(factors[i] for i in axes):
                _check_even(shape[dim], dim, axes, mesh)
    else:
        given = axes_of_dims(dtensor)
        orders = [given.get(dim, axes) for dim, axes in enumerate(nesting)]
    order = _merged(orders, mesh)
    return TensorSpec(shape, dtensor.dtype, Spec(mesh, placements, order))


def from_dtensor(dtensor: DTensor) -> tuple[torch.Tensor, TensorSpec]:
    """Return this rank's local tensor and the layout; gradients flow. Not collective.

    Raises:
        MeshTypeError, MeshValueError: as `tensor_spec_of`.
    """
    spec = tensor_spec_of(dtensor)
    return dtensor.to_local(), spec


def to_dtensor(local: torch.Tensor, spec: TensorSpec, device_mesh: DeviceMesh) -> DTensor:
    """Return the DTensor whose part this rank holds; gradients flow. Not collective.

    Args:
        local: of `spec.local_shape(rank)`; its memory is used, not copied.
        spec: of a `Spec` without ragged parts.
        device_mesh: torch's mesh of the same axes and ranks, as `ProcessMesh.to_device_mesh` makes.

    Raises:
        MeshTypeError: the spec is flat, or an argument is of another type.
        MeshValueError: the spec is ragged, another mesh was given, the local tensor has another
            shape or dtype, or axes in another order than the mesh's cut a dim unevenly.
    """
    check_kind(local, torch.Tensor, "to_dtensor needs this rank's local tensor")
    check_kind(spec, TensorSpec, "to_dtensor needs a TensorSpec")
    _check_mesh(spec, device_mesh)
    placements = _placements_of(spec)
    expected = spec.local_shape(device_mesh.get_rank())
    if tuple(local.shape) != expected or local.dtype != spec.dtype:
        raise MeshValueError(
            f"rank {device_mesh.get_rank()} holds {spec.dtype} of shape {expected} of this spec, "
            f"but gave {local.dtype} of shape {tuple(local.shape)}"
        )
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=_whole_strides(spec.shape, local),
    )


def _check_mesh(spec: TensorSpec, device_mesh: DeviceMesh) -> None:
    mesh = ProcessMesh.from_device_mesh(device_mesh)
    if mesh != spec.mesh:
        raise MeshValueError(
            f"the spec lies on {spec.mesh!r}, but {mesh!r} was given as device_mesh; give the "
            "DeviceMesh of the same axes and ranks"
        )


def _whole_strides(shape: tuple[int, ...], local: torch.Tensor) -> tuple[int, ...]:
    """Of a tensor whose dims lie in memory in the order in which those of its parts do."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(reversed(range(len(shape))), key=local.stride):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def redistribute(
    dtensor: DTensor,
    target: Spec,
    device_mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    exchange: Exchange | None = None,
) -> DTensor:
    """Return the tensor in another layout; gradients flow back. Collective.

    As `DTensor.redistribute`, in one exchange that moves what each rank lacks and no more, and to
    other meshes of the same ranks. Every rank of the group calls.

    Args:
        dtensor: the tensor; partial sums are reduced.
        target: the layout; not partial, not ragged.
        device_mesh: torch's mesh of the target; the tensor's own if None.
        group: holds every rank of both meshes; if None, the default group where the meshes cover
            it, and that of the one axis of a smaller mesh: ranks of others do not call.
        exchange: as of `execute`.

    Raises:
        MeshTypeError, MeshValueError: as `tensor_spec_of`, `to_dtensor` and `reshard_tensor`; or
            no group was given for a smaller mesh of several axes.
    """
    check_kind(target, Spec, "redistribute needs a Spec as target")
    local, source = from_dtensor(dtensor)
    wanted = TensorSpec(source.shape, source.dtype, target)
    device_mesh = dtensor.device_mesh if device_mesh is None else device_mesh
    _placements_of(wanted)  # what cannot be is refused before anything moves
    _check_mesh(wanted, device_mesh)
    if set(wanted.mesh.ranks) != set(source.mesh.ranks):
        raise MeshValueError(
            f"{wanted.mesh!r} has other ranks than {source.mesh!r}; for those use reshard_tensor, "
            "which has something to return on ranks outside"
        )
    group = _group_of(dtensor.device_mesh, device_mesh) if group is None else group
    moved = reshard_tensor(local, source, wanted, group, exchange)
    return to_dtensor(moved, wanted, device_mesh)


def _group_of(*meshes: DeviceMesh) -> ProcessGroup | None:
    """The group of meshes of the same ranks; None: the default group."""
    num_ranks, world_size = meshes[0].size(), dist.get_world_size()
    if num_ranks == world_size:
        return None
    for mesh in meshes:
        if mesh.ndim == 1:
            return mesh.get_group()
    raise MeshValueError(
        f"the mesh holds {num_ranks} of the {world_size} ranks of the default process group, and "
        "those outside would be waited for; give group=, a process group of the mesh's ranks, as "
        "axis_group makes along several axes"
    )


def _placements_of(spec: TensorSpec) -> tuple[Placement, ...]:
    layout = spec.spec
    if isinstance(layout, FlatSpec):
        raise MeshTypeError(
            "a FlatSpec has no DTensor, whose shards are boxes; reshard to its `spec` first"
        )
    if layout.sizes:
        names = ", ".join(dict(layout.sizes))
        raise MeshValueError(
            f"ragged parts (along {names}) have no DTensor, which cuts as torch.chunk does; "
            "reshard to the same spec without sizes first"
        )
    placements = list(layout.placements)
    for dim, axes in enumerate(layout.nesting(len(spec.shape))):
        for axis, stride in zip(axes, _strides(axes, spec.mesh.shape), strict=True):
            if stride > 1:
                _check_even(spec.shape[dim], dim, axes, spec.mesh)
                placements[axis] = strided_shard(dim, stride)
    return tuple(placements)


def _strides(axes: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """torch's split factors of axes, outermost first: the pieces made by later axes of the mesh."""
    outer = [[other for other in axes[:i] if other > axis] for i, axis in enumerate(axes)]
    return [math.prod(sizes[other] for other in others) for others in outer]


def _order_of(axes: Sequence[int], strides: Sequence[int], spec: Spec) -> Sequence[int]:
    """The nesting of the axes of a dim, outermost first, that has these split factors."""
    wanted = [strides[axis] for axis in axes]
    for order in permutations(axes):  # mesh order comes first
        found = dict(zip(order, _strides(order, spec.mesh.shape), strict=True))
        if [found[axis] for axis in axes] == wanted:
            return order
    names = [spec.mesh.axis_names[axis] for axis in axes]
    raise MeshValueError(
        f"no order of the axes {', '.join(names)} of {spec.mesh!r} has the split factors {wanted}; "
        "redistribute the DTensor to plain shards first"
    )


def _check_even(length: int, dim: int, axes: Sequence[int], mesh: ProcessMesh) -> None:
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if length % parts:
        names = ", ".join(mesh.axis_names[axis] for axis in axes)
        raise MeshValueError(
            f"dim {dim} of {length} is cut along {names} by strided shards, which divide it into "
            f"{parts} equal parts or hold no boxes; pad the dim, or use plain shards"
        )


def _merged(orders: Sequence[Sequence[int]], mesh: ProcessMesh) -> tuple[str, ...]:
    """One order of axes; each axis cuts one dim, so that the dims' orders never disagree."""
    return tuple(mesh.axis_names[axis] for axes in orders for axis in axes)

"""The process group of this rank along one or several mesh axes.

Training needs groups over products of axes, for example gradients over dp x ep. torch's public
`DeviceMesh.get_group` answers for one axis only.

Invariant: the rank inside the group is the position in `ProcessMesh.groups(*axes)`.

    device_mesh = ProcessMesh((2, 4), ("dp", "ep")).to_device_mesh("cpu")
    dist.all_reduce(grad, group=axis_group(device_mesh, "dp", "ep"))
"""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from mesh_spmd._checks import check_kind
from mesh_spmd._torch_private import root_of
from mesh_spmd.errors import MeshStateError
from mesh_spmd.mesh.process_mesh import ProcessMesh

# By the root mesh itself, not by its value: an equal mesh of a later job has other groups.
# torch's own `DeviceMesh._flatten` would import torch._dynamo, seconds on every rank.
_GROUPS_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()


def axis_group(device_mesh: DeviceMesh, *axes: str) -> ProcessGroup:
    """Return the process group of the calling rank along `axes`; their order does not matter.

    One axis: not collective. Several axes: the first call for a set of axes is collective over the
    default process group, and every rank must make it; later calls return the same group. The group
    belongs to the root of `device_mesh` and lives as long as it.

    Raises:
        MeshTypeError: `device_mesh` is no DeviceMesh, or an axis is not a string.
        MeshValueError: an axis is unknown or named twice; the mesh has no axis names; or its ranks
            do not ascend along several axes.
        MeshStateError: the calling rank is outside the mesh; or several axes are asked of a mesh
            that leaves out ranks of the default group, which torch needs to take part.
    """
    check_kind(device_mesh, DeviceMesh, "axis_group needs torch's DeviceMesh")
    if device_mesh.get_coordinate() is None:
        raise MeshStateError(
            f"rank {dist.get_rank()} is not in the device mesh of shape {tuple(device_mesh.shape)} "
            f"and has no group along {', '.join(axes)}; call axis_group on the mesh's ranks only"
        )
    mesh = ProcessMesh.from_device_mesh(device_mesh)
    in_order = mesh.sorted_axes(axes)
    if len(in_order) == 1:
        return device_mesh.get_group(in_order[0])
    mesh.check_ascending(*in_order)
    root = root_of(device_mesh)
    covered, world_size = root.size(), dist.get_world_size()
    if covered != world_size:
        raise MeshStateError(
            f"a group along {', '.join(in_order)} must be created by all {world_size} ranks of the "
            f"default process group, but the mesh holds {covered} of them; use a mesh that covers "
            "every rank, with one more axis for the ranks that do something else"
        )
    groups = _GROUPS_OF.setdefault(root, {})
    if in_order not in groups:
        groups[in_order] = _new_group(root, in_order)
    group: ProcessGroup = groups[in_order]
    return group


def _new_group(root: DeviceMesh, axes: tuple[str, ...]) -> ProcessGroup:
    """Make the groups of all ranks along `axes`, as torch requires, and return this rank's."""
    rank = dist.get_rank()
    mine = None
    for ranks in ProcessMesh.from_device_mesh(root).groups(*axes):
        group = dist.new_group(list(ranks), group_desc="mesh_" + "_".join(axes))
        if rank in ranks:
            mine = group
    if not isinstance(mine, ProcessGroup):
        raise MeshStateError(f"rank {rank} is in no group along {', '.join(axes)} of {root}")
    return mine

"""The only module that uses torch's private API: flattening axes of a `DeviceMesh` into one.

torch has no public way to make the process group over several axes and to keep it with the mesh
that it belongs to. `DeviceMesh._flatten` does both; it is the same in torch 2.11 to 2.15.
"""

from torch.distributed.device_mesh import DeviceMesh


def root_of(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `device_mesh` was sliced from, or itself."""
    return device_mesh._get_root_mesh()


def flattened(device_mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the 1-D mesh over `axes` (in mesh order), made on first use and kept by the root mesh.

    Collective on first use over the default process group, which the root mesh must cover.
    """
    sliced = device_mesh[axes]
    try:
        # torch's own name ("dp_ep"), so that FSDP and the like share the group.
        return sliced._flatten("_".join(axes))
    except ValueError:
        # Raised before anything is created, alike on every rank, when the name is an axis already
        # or stands for other axes ("a_b" + "c" and "a" + "b_c").
        return sliced._flatten("mesh_spmd:" + ",".join(axes))

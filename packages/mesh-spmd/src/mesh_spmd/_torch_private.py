"""The only module that uses torch's private API: from a slice of a `DeviceMesh` to the whole.

torch has no public way to ask a slice of a mesh for the mesh that it was cut from, to which the
groups over several axes belong. It is the same in torch 2.11 to 2.15.
"""

from torch.distributed.device_mesh import DeviceMesh


def root_of(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `device_mesh` was sliced from, or itself."""
    return device_mesh._get_root_mesh()

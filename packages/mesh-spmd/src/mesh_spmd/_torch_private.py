"""The only module that uses torch's private API: roots of meshes, strided shards, a late import.

torch has no public way to ask a slice of a mesh for the mesh that it was cut from, to which the
groups over several axes belong, and no public name for the shards that FSDP2 makes of a tensor
which tensor parallelism has cut. Read for torch 2.11 to 2.15.
"""

from importlib import import_module

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard


def root_of(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `device_mesh` was sliced from, or itself."""
    return device_mesh._get_root_mesh()


def strided_shard(dim: int, factor: int) -> Placement:
    """Return torch's placement of a shard of each of `factor` pieces of a dim."""
    return _StridedShard(dim, split_factor=factor)


def split_factor(placement: Placement) -> tuple[int, int] | None:
    """Return the dim and the split factor of a strided shard, None for any other placement."""
    if not isinstance(placement, _StridedShard):
        return None
    return placement.dim, int(placement.split_factor)


def load_redistribute() -> None:
    """Import what `DTensor.redistribute` imports when it is first called, for ranks to be forked.

    It takes each of them seconds.
    """
    import_module("torch._dynamo")


def axes_of_dims(dtensor: DTensor) -> dict[int, tuple[int, ...]]:
    """Return for each dim that is cut the axes' indices from the outermost on, as torch notes them
    beside plain shards.
    """
    order = getattr(dtensor._spec, "shard_order", None) or ()
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}

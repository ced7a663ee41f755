"""The whole tensor from the shapes of its parts: even, uneven and ragged.

infer_tensor_spec({0: (3, 8), 1: (0, 8), 2: (5, 8)}, torch.bfloat16, mesh, (Shard(0),))
# (8, 8), ep cut into 3, 0, 5
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import Placement

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout import Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh


def infer_tensor_spec(
    shapes: Mapping[int, Sequence[int]],
    dtype: torch.dtype,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
) -> TensorSpec:
    """Return the tensor that local tensors of these shapes make up. Not collective.

    A dim that one axis shards may have any parts: where they are not those of torch.chunk, the
    layout has them as `sizes`. A dim that several axes shard is cut evenly, one in the other.

    Args:
        shapes: the local shape of every rank of the mesh.
        dtype: of all of them.
        mesh: the mesh.
        placements: one for each axis.

    Raises:
        MeshTypeError: something has a wrong type.
        MeshValueError: a rank is missing, or its shape does not fit the others; the error names
            the rank and the box that was expected.
    """
    check_kind(shapes, Mapping, "shapes must map ranks to local shapes")
    check_kind(placements, Iterable, "placements must be a sequence")
    spec = Spec(mesh, tuple(placements))
    missing = [rank for rank in mesh.ranks if rank not in shapes]
    if missing:
        raise MeshValueError(f"ranks {missing[:8]} of {mesh!r} have no local shape; give all")
    local = {
        rank: checked_sizes(shapes[rank], what=f"the local shape of rank {rank}", smallest_size=0)
        for rank in mesh.ranks
    }
    ndim = len(local[mesh.ranks[0]])
    whole, sizes = [], {}
    for dim, axes in enumerate(spec.dims_mapping(ndim)):
        group = mesh.groups(*axes)[0] if axes else mesh.ranks[:1]
        lengths = tuple(local[rank][dim] if dim < len(local[rank]) else 0 for rank in group)
        whole.append(sum(lengths))
        part = -(-sum(lengths) // len(lengths))
        even = tuple(min(part, max(0, sum(lengths) - part * i)) for i in range(len(lengths)))
        if len(axes) == 1 and lengths != even:
            sizes[axes[0]] = lengths
    found = TensorSpec(tuple(whole), dtype, Spec(mesh, spec.placements, (), sizes))
    for rank in mesh.ranks:
        box = found.box(rank)
        if local[rank] != box.shape:
            raise MeshValueError(
                f"rank {rank} has a local tensor of shape {local[rank]}; as part of {found.shape} "
                f"with {spec.placements} over {mesh!r} it must be {box.shape} ({box})"
            )
    return found

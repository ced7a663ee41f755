"""The check against torch: DTensor's own redistribute is an oracle without our plans."""

from __future__ import annotations

import torch

from mesh_spmd.interop import from_dtensor, redistribute, to_dtensor
from mesh_spmd.layout import FlatSpec
from mesh_spmd.reshard import reshard_tensor
from mesh_spmd.trials.case import At, Case
from mesh_spmd.trials.grouping import not_grouped
from mesh_spmd.trials.values import difference, known_part, num_digits

# Of which torch's collectives move and add on gloo as well as on NCCL.
_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int8, torch.uint8, torch.int32, torch.int64}
)


def check_dtensor(at: At) -> list[str]:
    """Both redistribute one DTensor; ours is handed over and back."""
    source, target, found = at.case.source, at.case.target, []
    device_mesh = source.mesh.to_device_mesh(at.case.device_type)
    for digit in range(num_digits(source)):
        local = known_part(source, at.rank, digit, device=at.device)
        before = to_dtensor(local, source, device_mesh)
        theirs = before.redistribute(device_mesh, target.boxes.placements).to_local()
        ours = reshard_tensor(local, source, target)
        found += difference(ours, theirs, target, at.rank, "against torch's redistribute")
        after, spec = from_dtensor(redistribute(before, target.boxes))
        found += difference(after, theirs, target, at.rank, "redistribute against torch's")
        if spec.box(at.rank) != target.box(at.rank):
            found.append(
                f"rank {at.rank}, layout of the DTensor: got {spec.box(at.rank)}, "
                f"expected {target.box(at.rank)}"
            )
    return found


def no_dtensor(case: Case) -> str:
    """Why torch's DTensor cannot say the same."""
    if case.source.mesh != case.target.mesh:
        return "torch redistributes on one mesh"
    if case.source.mesh.size != case.world_size:
        return "the mesh leaves out ranks of the job"
    if case.source.dtype not in _DTYPES:
        return f"torch's collectives do not all move {case.source.dtype}"
    for tensor in (case.source, case.target):
        if isinstance(tensor.spec, FlatSpec):
            return "DTensor has no ranges of elements"
        if tensor.spec.sizes:
            return "DTensor has no ragged parts"
        if any(list(axes) != sorted(axes) for axes in tensor.spec.nesting(len(tensor.shape))):
            return "torch does not redistribute another order of axes than the mesh's"
    return not_grouped(case)

"""Checks of parts: a tensor is split along an axis into parts on sub-meshes, and joined again.

As experts of a mesh that has an axis of stages: each stage gets rows of its own.
"""

from __future__ import annotations

import math

from mesh_spmd.layout import Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard import join_tensors, split_tensor
from mesh_spmd.trials.case import At, Case
from mesh_spmd.trials.values import difference, known_part, num_digits


def check_parts(at: At) -> list[str]:
    """Along each axis of the source, rows go to the ranks of each index, and come back."""
    whole, found = at.case.source, []
    for axis in _axes(whole):
        parts = _parts(whole, axis)
        row = math.prod(whole.shape[1:])
        for digit in range(num_digits(whole)):
            local = known_part(whole, at.rank, digit, device=at.device)
            held = split_tensor(local, whole, parts)
            start = 0
            for number, (part, piece) in enumerate(zip(parts, held, strict=True)):
                wanted = known_part(part, at.rank, digit, device=at.device, start=start * row)
                what = f"part {number} along {axis}"
                found += difference(piece, wanted, part, at.rank, what)
                start += part.shape[0]
            again = join_tensors(held, parts, whole)
            found += difference(again, local, whole, at.rank, f"joined along {axis}")
    return found


def not_parted(case: Case) -> str:
    """Why nothing is split."""
    if case.source.partials:
        return "a partial tensor has no parts"
    if not case.source.shape:
        return "a scalar has no parts"
    return "" if _axes(case.source) else "no axis of the source has two ranks"


def _axes(whole: TensorSpec) -> list[str]:
    return [axis for axis in whole.mesh.axis_names if whole.mesh.axis_size(axis) > 1]


def _parts(whole: TensorSpec, axis: str) -> list[TensorSpec]:
    """Rows for each index of `axis`, uneven if need be, laid out evenly as the whole is."""
    mesh = whole.mesh
    size, rows = mesh.axis_size(axis), whole.shape[0]
    found = []
    for index in range(size):
        ranks = [rank for rank in mesh.ranks if mesh.coordinate(rank)[axis] == index]
        sizes = tuple(1 if name == axis else mesh.axis_size(name) for name in mesh.axis_names)
        spec = Spec(ProcessMesh(sizes, mesh.axis_names, ranks), whole.boxes.placements)
        length = rows * (index + 1) // size - rows * index // size
        found.append(TensorSpec((length, *whole.shape[1:]), whole.dtype, spec))
    return found

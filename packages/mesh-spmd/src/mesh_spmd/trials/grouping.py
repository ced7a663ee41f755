"""Checks of groups: an all-reduce along each axis meets the ranks that the mesh says, no others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from mesh_spmd.errors import MeshValueError
from mesh_spmd.mesh import ProcessMesh, axis_group
from mesh_spmd.trials.case import At, Case


def check_groups(at: At) -> list[str]:
    """Each rank adds a one at its own place; the sum shows who was in the group."""
    found = []
    for mesh in at.case.meshes:
        device_mesh = mesh.to_device_mesh(at.case.device_type)
        for axes in _sets_of_axes(mesh, at.case):
            if mesh.position(at.rank) is None:
                continue  # one axis: not collective on ranks outside
            group = axis_group(device_mesh, *axes)
            present = torch.zeros(at.case.world_size, dtype=torch.int64, device=at.device)
            present[at.rank] = 1
            dist.all_reduce(present, group=group)
            counts = present.tolist()
            got = [rank for rank, count in enumerate(counts) for _ in range(count)]
            (expected,) = (g for g in mesh.groups(*axes) if at.rank in g)
            if got != sorted(expected):
                found.append(
                    f"rank {at.rank}, along {', '.join(axes)} of {mesh!r}: "
                    f"got ranks {got}, expected {list(expected)}"
                )
            place = dist.get_rank(group)
            if place != expected.index(at.rank):
                found.append(
                    f"rank {at.rank}, along {', '.join(axes)} of {mesh!r}: got place {place} in "
                    f"the group, expected {expected.index(at.rank)}"
                )
    return found


def not_grouped(case: Case) -> str:
    """Why torch can make no groups of the meshes."""
    for mesh in case.meshes:
        try:
            for axis in mesh.axis_names:
                mesh.check_ascending(axis)
        except MeshValueError as error:
            return str(error)
    return ""


def _sets_of_axes(mesh: ProcessMesh, case: Case) -> Iterator[tuple[str, ...]]:
    """Each axis, and all together where torch makes such a group: of a mesh of every rank."""
    yield from ((axis,) for axis in mesh.axis_names)
    whole = tuple(range(case.world_size))
    if len(mesh.axis_names) > 1 and mesh.ranks == whole:
        yield mesh.axis_names

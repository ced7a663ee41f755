"""Checks of what is made: parts of new tensors, and layouts that are found again from shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from mesh_spmd.creation import arange, empty, full, infer_tensor_spec, randn, shard_tensor
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard import reshard_tensor
from mesh_spmd.trials.case import At, Case
from mesh_spmd.trials.values import difference, known_part

_Maker = Callable[[TensorSpec], torch.Tensor]


def check_creation(at: At) -> list[str]:
    """A rank's part of a new tensor is cut out of what one process makes of the whole."""
    found = []
    for name, tensor in _sides(at.case):
        if tensor.mesh.position(at.rank) is None:
            continue
        alone = Spec.from_axes(ProcessMesh((1,), ("one",), (at.rank,)), {})
        for maker, make in _makers(at):
            whole = make(TensorSpec(tensor.shape, tensor.dtype, alone))
            part, what = shard_tensor(whole, tensor, at.rank), f"{maker} in the {name}"
            found += difference(make(tensor), part, tensor, at.rank, what)
        got, expected = empty(tensor, at.rank).shape, tensor.local_shape(at.rank)
        if tuple(got) != expected:
            found.append(f"rank {at.rank}, empty in the {name}: got {got}, expected {expected}")
    return found


def check_shapes(at: At) -> list[str]:
    """From the shapes that ranks hold after resharding, each side's boxes are found again."""
    source, target = at.case.source, at.case.target
    local = known_part(source, at.rank, 0, device=at.device)
    there = reshard_tensor(local, source, target)
    gathered: list[tuple[tuple[int, ...], ...]] = [()] * at.case.world_size
    dist.all_gather_object(gathered, (tuple(local.shape), tuple(there.shape)))
    found = []
    for number, (name, tensor) in enumerate(_sides(at.case)):
        if _not_inferred(tensor):
            continue
        mesh, boxes = tensor.mesh, tensor.boxes
        shapes = {rank: gathered[rank][number] for rank in mesh.ranks}
        if at.rank != mesh.ranks[0]:
            continue  # one rank tells of all
        try:
            again = infer_tensor_spec(shapes, tensor.dtype, mesh, boxes.placements)
        except MeshValueError as error:
            found.append(f"{name} from shapes: {error}")
            continue
        found += [
            f"rank {rank}, {name} from shapes: got {again.box(rank)}, expected {tensor.box(rank)}"
            for rank in mesh.ranks
            if again.box(rank) != tensor.box(rank)
        ]
    return found


def not_inferred(case: Case) -> str:
    """Why no layout is found again from shapes; nothing if that of one side is."""
    why = [_not_inferred(tensor) for _, tensor in _sides(case)]
    return why[0] if all(why) else ""


def _not_inferred(tensor: TensorSpec) -> str:
    if isinstance(tensor.spec, FlatSpec):
        return "ranges of elements do not show the shape of their box"
    if tensor.spec.order:
        return "shapes do not show an order of axes"
    ragged = dict(tensor.spec.sizes)
    names = tensor.mesh.axis_names
    for axes in tensor.spec.nesting(len(tensor.shape)):
        if len(axes) > 1 and any(names[axis] in ragged for axis in axes):
            return "shapes do not show ragged parts inside others"
    return ""


def _sides(case: Case) -> tuple[tuple[str, TensorSpec], tuple[str, TensorSpec]]:
    return ("source", case.source.reduced()), ("target", case.target)


def _makers(at: At) -> Iterator[tuple[str, _Maker]]:
    yield "arange", lambda tensor: arange(tensor, at.rank, device=at.device)
    yield "full", lambda tensor: full(tensor, at.rank, 1, device=at.device)
    if at.case.source.dtype.is_floating_point:
        yield "randn", lambda tensor: randn(tensor, at.rank, seed=0, device=at.device)

"""Layouts of a whole state dict: patterns of names say which axes should shard which dims.

Invariant: nothing falls back silently. A tensor that is not cut as its rule wants says why, a
tensor without a rule says so, and a rule that no tensor meets is an error.

    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    rules = {"*.experts.*": {"ep": 0}, "*": {"dp": 0}}
    for layout in choose_layouts(shapes, mesh, rules=rules):
        print(layout.name, layout.spec.placements, layout.reason)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import SupportsIndex, final

from torch.distributed.tensor import Placement, Shard

from mesh_spmd._checks import check_kind, checked_sizes
from mesh_spmd.errors import MeshValueError
from mesh_spmd.layout.choice import choose_placements
from mesh_spmd.layout.spec import Spec, resolved_dim
from mesh_spmd.mesh import ProcessMesh


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How one tensor of a state dict is to lie on a mesh.

    Attributes:
        name: its key.
        shape: of the whole tensor.
        spec: the layout that was chosen.
        rule: the pattern that it follows; None: no rule names it, it is replicated.
        reason: why it is not cut as the rule wants; empty where it is.
    """

    name: str
    shape: tuple[int, ...]
    spec: Spec
    rule: str | None
    reason: str


def choose_layouts(
    shapes: Mapping[str, Sequence[SupportsIndex]],
    mesh: ProcessMesh,
    *,
    rules: Mapping[str, Mapping[str, int]],
    ragged: bool = False,
) -> list[TensorLayout]:
    """Return the layout of each tensor, in the order given. Not collective.

    The first rule whose pattern meets a name counts; a pattern is that of a shell, in which `*`
    meets dots too. Where a size does not divide by all wanted axes, `choose_placements` takes the
    largest combination that divides, and the others replicate.

    Args:
        shapes: the shape of each whole tensor by its name.
        mesh: the mesh.
        rules: for each pattern the tensor dim that each axis should shard.
        ragged: shard one more axis in parts that differ by one element at most, inside the axes
            that divide, where that cuts the dim into more parts; zeros for the indices beyond.

    Raises:
        MeshTypeError: an argument is of a wrong type.
        MeshValueError: an axis is unknown, a rule wants a dim that a tensor lacks, or a rule meets
            no tensor.
    """
    check_kind(shapes, Mapping, "shapes must map names to the shapes of whole tensors")
    check_kind(mesh, ProcessMesh, "mesh must be a ProcessMesh")
    check_kind(rules, Mapping, "rules must map patterns of names to {axis: dim}")
    for pattern, wanted in rules.items():
        check_kind(pattern, str, "the pattern of a rule must be a string")
        check_kind(wanted, Mapping, f"rule {pattern!r} must map axes to tensor dims")
    used = set()
    layouts = []
    for name, given in shapes.items():
        check_kind(name, str, "the name of a tensor must be a string")
        shape = checked_sizes(given, what=f"shape of {name}", smallest_size=0)
        rule = next((pattern for pattern in rules if fnmatchcase(name, pattern)), None)
        if rule is None:
            spec, reason = Spec.from_axes(mesh, {}), "no rule names it: it is replicated"
        else:
            used.add(rule)
            spec, reason = _chosen(name, shape, mesh, rules[rule], ragged=ragged)
        layouts.append(TensorLayout(name=name, shape=shape, spec=spec, rule=rule, reason=reason))
    unused = [pattern for pattern in rules if pattern not in used]
    if unused:
        raise MeshValueError(
            f"no tensor follows the rules {unused}; the {len(shapes)} names begin with "
            f"{list(shapes)[:3]}: correct the patterns, or put them before wider ones"
        )
    return layouts


@dataclass(slots=True)
class _Cuts:
    """What is chosen for a tensor, dim after dim."""

    placements: dict[str, Placement] = field(default_factory=dict)
    even: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def _chosen(
    name: str, shape: tuple[int, ...], mesh: ProcessMesh, wanted: Mapping[str, int], *, ragged: bool
) -> tuple[Spec, str]:
    try:
        dims = {axis: resolved_dim(dim, len(shape), axis) for axis, dim in wanted.items()}
        even = dict(zip(mesh.axis_names, choose_placements(shape, mesh, shard=dims), strict=True))
    except MeshValueError as error:
        raise MeshValueError(f"{name} of shape {shape}: {error}") from error
    cuts = _Cuts()
    for dim in sorted(set(dims.values())):
        axes = [axis for axis in mesh.axis_names if dims.get(axis) == dim]
        fitting = [axis for axis in axes if isinstance(even[axis], Shard)]
        cuts.placements.update({axis: even[axis] for axis in fitting})
        cuts.even.extend(fitting)
        if fitting != axes:
            _fall_back(cuts, mesh, (dim, shape[dim]), axes, ragged=ragged)
    order = [*cuts.even, *cuts.sizes] if cuts.sizes else ()
    spec = Spec.from_axes(mesh, cuts.placements, order=order, sizes=cuts.sizes)
    return spec, "; ".join(cuts.reasons)


def _fall_back(
    cuts: _Cuts, mesh: ProcessMesh, dim: tuple[int, int], axes: Sequence[str], *, ragged: bool
) -> None:
    """Say why a dim, given as (number, size), is not cut by all axes; cut it raggedly if asked."""
    number, size = dim
    fitting = [axis for axis in axes if axis in cuts.placements]
    left = [axis for axis in axes if axis not in cuts.placements]
    parts = math.prod(map(mesh.axis_size, axes))
    named = " x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in axes)
    reason = f"dim {number} is {size}, which does not divide by {named}"
    reason += f" = {parts}: " if len(axes) > 1 else ": "
    piece = size // math.prod(map(mesh.axis_size, fitting))
    if ragged and piece > 1:  # else no axis makes more parts
        more = max(left, key=mesh.axis_size)
        count = mesh.axis_size(more)
        cuts.placements[more] = Shard(number)
        cuts.sizes[more] = tuple(piece // count + (i < piece % count) for i in range(count))
        left.remove(more)
        reason += f"{more} is ragged" + (", " if left else "")
    if left:
        reason += f"{', '.join(left)} {'replicates' if len(left) == 1 else 'replicate'}"
    cuts.reasons.append(reason)

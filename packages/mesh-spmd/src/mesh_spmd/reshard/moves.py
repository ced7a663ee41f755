"""Moves: one tensor, or one part of it, from one layout without partial values to another.

A tensor with partial values is as many tensors as there are addends: each lies on the sub-mesh
that holds it, and moves to the target, where they are reduced. Partial values that stay partial
move from sub-mesh to sub-mesh. A new partial sum is the value on the first index of an axis, and
zeros on the others.

    moves_of(Link(source=0, target=0), source, target)    # one move, unless something is partial
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch.distributed.tensor import Partial, Replicate

from mesh_spmd.errors import MeshTypeError
from mesh_spmd.layout import FlatSpec, Spec, TensorSpec
from mesh_spmd.mesh import ProcessMesh
from mesh_spmd.reshard.caches import remembered
from mesh_spmd.reshard.cells import Cells, cells_of, shared, window
from mesh_spmd.reshard.tilings import Tiling, tiling_of

Shares = torch.Tensor | Sequence[Sequence[int]]
"""[cells, replicas] elements that each holder of a cell sends."""

_LINEAR = ("sum", "avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Which source goes to which target; one may be a box of the other, `shift` elements in it."""

    source: int
    target: int
    shift: tuple[int, ...] | None = None
    inner_target: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One end of a move: a tensor's shape, a layout without partial values, and where it lies."""

    shape: tuple[int, ...]
    spec: Spec | FlatSpec
    shift: tuple[int, ...]

    @property
    def cells(self) -> Cells:
        """What each rank holds."""
        return cells_of(self.shape, self.spec, self.shift)

    @property
    def tiling(self) -> Tiling:
        """How it is cut, for questions about one rank."""
        return tiling_of(self.shape, self.spec, self.shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One exchange of one tensor; `addend` numbers the values of a reduction."""

    link: Link
    source: Side
    target: Side
    addend: int
    dtype: torch.dtype

    def totals(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Elements: what each target rank holds already, what it lacks, what source cells owe."""
        source, target = self.source.cells, self.target.cells
        in_source, in_target = common(self.source.spec.mesh, self.target.spec.mesh)
        wanted, held = target.numel, source.numel[source.holders[:, 0]]
        if self.link.shift is not None:
            inner = self.target if self.link.inner_target else self.source
            part = window(inner.shape, inner.shift)
            wanted = shared(target, part).numel
            held = shared(source.pick(source.holders[:, 0]), part).numel
        owed = held * target.num_replicas
        if self.source.spec.mesh == self.target.spec.mesh:
            kept = shared(source, target).numel
            return kept, wanted - kept, owed.index_add_(0, source.cell, kept, alpha=-1)
        own = shared(source.pick(in_source), target.pick(in_target)).numel
        kept = torch.zeros_like(target.numel).index_add_(0, in_target, own)
        due = owed.index_add_(0, source.cell[in_source], own, alpha=-1)
        return kept, wanted - kept, due


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How addends become values: kinds and sizes of the axes, in mesh order; the last one first.

    Without kinds there is one addend, the value. On the `kept` axes values were and stay partial.
    """

    kinds: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def num_addends(self) -> int:
        """How many addends make one value."""
        return math.prod(self.sizes)


def moves_of(link: Link, source: TensorSpec, target: TensorSpec) -> tuple[list[Move], Reduction]:
    """Return the moves of a link, and how their addends are reduced.

    Raises:
        MeshTypeError: an average is due of integers, or a logical reduction of floating point.
    """
    due = source.partials
    kept = _kept_axes(source, target) if link.shift is None else ()
    reduced = tuple(axis for axis in due if axis not in kept)
    for axis in reduced:
        _check_reduction(due[axis], source.dtype)
    first = {a: 0 for a, kind in target.partials.items() if kind in ("sum", "product")}
    sizes = source.mesh.axis_size
    zeros = (0,) * len(source.shape)
    shift = zeros if link.shift is None else link.shift
    source_shift, target_shift = (zeros, shift) if link.inner_target else (shift, zeros)
    moves = []
    for at in product(*(range(sizes(axis)) for axis in kept)):
        fixed = dict(zip(kept, at, strict=True))
        to = Side(
            shape=target.shape, spec=restricted(target.spec, {**first, **fixed}), shift=target_shift
        )
        for number, index in enumerate(product(*(range(sizes(axis)) for axis in reduced))):
            here = fixed | dict(zip(reduced, index, strict=True))
            spec = restricted(source.spec, here)
            side = Side(shape=source.shape, spec=spec, shift=source_shift)
            moves.append(Move(link=link, source=side, target=to, addend=number, dtype=source.dtype))
    kinds = tuple(due[axis] for axis in reduced)
    return moves, Reduction(kinds=kinds, sizes=tuple(map(sizes, reduced)), kept=kept)


def restricted(spec: Spec | FlatSpec, fixed: Mapping[str, int]) -> Spec | FlatSpec:
    """Return the layout on the sub-mesh where the axes of `fixed` have these indices.

    What is partial on another axis counts as replicated.
    """
    if isinstance(spec, FlatSpec):
        boxes = restricted(spec.spec, fixed)
        return FlatSpec(boxes, spec.axes, spec.sizes) if isinstance(boxes, Spec) else boxes
    mesh = spec.mesh
    axes = tuple(axis for axis in mesh.axis_names if axis not in fixed)
    placements = {axis: spec.placement(axis) for axis in axes}
    whole = {a: Replicate() if isinstance(p, Partial) else p for a, p in placements.items()}
    if not fixed and whole == placements:
        return spec
    if not axes:
        return Spec(ProcessMesh((1,), ("rank",), (mesh.rank_at(**fixed),)), (Replicate(),))
    order = [axis for axis in spec.order if axis in axes]
    sub = mesh.submesh(*axes, of=fixed) if fixed else mesh
    return Spec.from_axes(sub, whole, order=order, sizes=dict(spec.sizes))


@remembered(maxsize=256)
def common(source: ProcessMesh, target: ProcessMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions, in each of the two meshes, of the ranks that are in both."""
    found = [
        (at, there)
        for at, there in enumerate(map(target.position, source.ranks))
        if there is not None
    ]
    return torch.tensor([at for at, _ in found], dtype=torch.int64), torch.tensor(
        [there for _, there in found], dtype=torch.int64
    )


def _kept_axes(source: TensorSpec, target: TensorSpec) -> tuple[str, ...]:
    """Axes of partial values that stay as they are: nothing else is reduced around them."""
    if source.mesh != target.mesh:
        return ()
    due, wanted = source.partials, target.partials
    kept: list[str] = []
    around: set[str] = set()
    for axis, kind in due.items():
        commutes = all(o == kind or (o in _LINEAR and kind in _LINEAR) for o in around)
        if wanted.get(axis) == kind and commutes:
            kept.append(axis)
        else:
            around.add(kind)
    return tuple(kept)


def _check_reduction(kind: str, dtype: torch.dtype) -> None:
    if kind == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise MeshTypeError(f"Partial('avg') of {dtype} has no exact result; give a floating dtype")
    if kind in ("any", "all") and dtype != torch.bool:
        raise MeshTypeError(f"Partial({kind!r}) is of torch.bool, got {dtype}")
    if kind in ("max", "min") and dtype.is_complex:
        raise MeshTypeError(f"Partial({kind!r}) of {dtype} has no order; give a real dtype")
    if not _exists(kind, dtype):
        raise MeshTypeError(
            f"torch has no Partial({kind!r}) of {dtype}; reduce it in another dtype, such as "
            "torch.float32"
        )


@cache
def _exists(kind: str, dtype: torch.dtype) -> bool:
    """Whether torch reduces such values, on the CPU, so that all ranks decide alike."""
    try:
        value = torch.zeros(1, dtype=torch.uint8).to(dtype)
        _OPERATIONS[kind](value, value)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "any": torch.logical_or,
    "all": torch.logical_and,
}

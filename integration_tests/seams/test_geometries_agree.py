"""The three geometries of the repository against each other and against DTensor: what a rank holds.

mesh-spmd's boxes and flat ranges, unified-ckpt's boxes, and moe-train's intersections with stored
tensors, on random uneven, nested, ragged and flat cases. torch's own slices of a numbered tensor
decide.
"""

import itertools
import math
import operator
import random

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from mesh_spmd import Box, FlatSpec, ProcessMesh, Spec, TensorSpec, local_box, plan_reshard
from mesh_spmd.reshard.parts import plan_split
from moe_train.layout import ParameterLayout, stored_tensors
from moe_train.layout.stored_form import StoredForm
from unified_ckpt import Box as StoredBox
from unified_ckpt.geometry import overlap
from weight_convert import StoredView

CASES = 60


def random_case(chance: random.Random) -> tuple[tuple[int, ...], Spec, dict[str, list[int]]]:
    """A shape, a layout of it, and the parts of its ragged axes."""
    mesh_shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
    mesh = ProcessMesh(mesh_shape, tuple("abc"[: len(mesh_shape)]))
    shape = tuple(chance.choice([0, 1, 2, 3, 5, 7, 8, 13]) for _ in range(chance.randint(1, 3)))
    kinds: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))] * 2]
    placements = tuple(chance.choice(kinds) for _ in mesh_shape)
    ragged = {}
    for dim, size in enumerate(shape):
        axes = [a for a, p in zip(mesh.axis_names, placements, strict=True) if p == Shard(dim)]
        if axes and chance.random() < 0.3:
            cuts = sorted(chance.randint(0, size) for _ in range(mesh.axis_size(axes[0]) - 1))
            ragged[axes[0]] = [b - a for a, b in itertools.pairwise([0, *cuts, size])]
    return shape, Spec(mesh, placements, (), ragged), ragged


def stored_box(
    shape: tuple[int, ...], spec: Spec, ragged: dict[str, list[int]], rank: int
) -> StoredBox:
    """The same part by unified-ckpt's arithmetic: one cut after the other, in mesh order."""
    box, at = StoredBox.whole(shape), spec.mesh.coordinate(rank)
    for axis, placement in zip(spec.mesh.axis_names, spec.placements, strict=True):
        if isinstance(placement, Shard) and axis in ragged:
            box = box.sizes(placement.dim, sizes=ragged[axis], index=at[axis])
        elif isinstance(placement, Shard):
            num = spec.mesh.axis_size(axis)
            box = box.chunk(placement.dim, num=num, index=at[axis])
    return box


def test_boxes_are_those_of_unified_ckpt_and_of_dtensor() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for number in range(CASES):
        shape, spec, ragged = random_case(chance)
        case = f"seed {seed}, case {number}: {shape} {spec}"
        numbered = torch.arange(math.prod(shape)).view(shape)
        for rank in spec.mesh.ranks:
            ours, theirs = local_box(shape, spec, rank), stored_box(shape, spec, ragged, rank)
            assert ours.shape == theirs.local_shape, case
            there = Box(theirs.offset, theirs.local_shape).slices()
            assert torch.equal(numbered[ours.slices()], numbered[there]), case
            if not ragged:
                at = list(spec.mesh.coordinate(rank).values())
                local, offset = _compute_local_shape_and_global_offset(
                    shape, spec.mesh.shape, at, spec.placements
                )
                assert ours == Box(tuple(offset), tuple(local)), case


def test_flat_ranges_hold_the_elements_of_unified_ckpts() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for number in range(CASES):
        shape, spec, ragged = random_case(chance)
        mesh = spec.mesh
        free = [
            a for a, p in zip(mesh.axis_names, spec.placements, strict=True) if p == Replicate()
        ]
        if not free:
            continue
        flat = TensorSpec(shape, torch.float32, FlatSpec(spec, tuple(free)))
        numbered = torch.arange(math.prod(shape)).view(shape)
        for rank in mesh.ranks:
            at, index, num = mesh.coordinate(rank), 0, 1
            for axis in free:
                index, num = index * mesh.axis_size(axis) + at[axis], num * mesh.axis_size(axis)
            parts = stored_box(shape, spec, ragged, rank).flat_chunk(num=num, index=index)
            slices = [Box(b.offset, b.local_shape).slices() for b in parts.unflattened()]
            theirs = torch.cat([numbered[at].flatten() for at in slices])
            begin, end = flat.flat_range(rank)
            ours = numbered[flat.box(rank).slices()].flatten()[begin:end]
            assert torch.equal(ours, theirs), f"seed {seed}, case {number}: {shape} {flat}"


def test_intersections_with_stored_tensors_are_the_same_in_all_three() -> None:
    """A tensor stored as one tensor for each run of rows, as experts are, of any lengths."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for number in range(CASES):
        shape, spec, _ = random_case(chance)
        cuts = sorted(chance.randint(0, shape[0]) for _ in range(3))
        lengths = [b - a for a, b in itertools.pairwise([0, *cuts, shape[0]]) if b > a]
        if not lengths or 0 in shape:
            continue
        starts = list(itertools.accumulate(lengths, initial=0))
        rest = shape[1:]
        views = tuple(
            StoredView(
                key=str(i),
                offset=(starts[i], *(0 for _ in rest)),
                shape=(length, *rest),
                stored_shape=(length, *rest),
            )
            for i, length in enumerate(lengths)
        )
        form = StoredForm(shape=shape, views=views, to_stored=_same, to_memory=_same)
        layout = ParameterLayout(name="w", global_shape=shape, spec=spec, form=form)
        whole = TensorSpec(shape, torch.float32, spec)
        for rank in spec.mesh.ranks:
            case = f"seed {seed}, case {number}, rank {rank}: {shape} {spec}"
            held = local_box(shape, spec, rank)
            shards = stored_tensors({"w": layout}, {"w": torch.zeros(held.shape)}, rank).shards
            found = set()
            for shard in shards:
                view = views[int(shard.key)]
                offset = tuple(map(operator.add, shard.box.offset, view.offset))
                found.add((shard.key, offset, tuple(shard.box.local_shape)))
            boxes = (
                (v.key, overlap((held.offset, held.shape), (v.offset, v.shape))) for v in views
            )
            assert found == {(key, *box) for key, box in boxes if box is not None}, case
            alone = Spec(ProcessMesh((1,), ("a",), (rank,)), (Replicate(),))
            parts = [TensorSpec(v.shape, torch.float32, alone) for v in views]
            plan = plan_split(whole, parts)
            moves = plan.steps[0].moves
            copies = {
                (str(moves[p.move].link.target), p.offset, p.shape) for p in plan.copies(rank)
            }
            assert copies == found, case


def test_a_plan_from_a_layout_to_itself_moves_nothing() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(CASES):
        shape, spec, _ = random_case(chance)
        tensor = TensorSpec(shape, torch.float32, spec)
        assert plan_reshard(tensor, tensor).busiest_bytes == (0, 0), f"seed {seed}: {spec}"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

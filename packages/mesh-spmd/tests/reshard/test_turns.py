"""What `execute` allocates on running ranks, by storage, against the plan and the blocks."""

import cProfile
import math
import pstats
import random
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mesh_spmd import (
    FlatSpec,
    MeshTypeError,
    MeshValueError,
    ProcessMesh,
    Spec,
    TensorSpec,
    execute,
    plan_reshard,
)
from mesh_spmd.reshard.turns import schedule_of
from ranktest import run_ranks

MESH = ProcessMesh((2, 3), ("dp", "ep"))
SHAPE = (13, 7, 6)


class Allocated(TorchDispatchMode):
    """Counts the bytes of storages that are made inside it, and the most that lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        found = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(found):
            if storage._cdata not in known:
                self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(nest: object) -> list[torch.UntypedStorage]:
    leaves = tree_leaves(nest)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def test_the_counter_sees_what_lives_at_one_time() -> None:
    given = torch.zeros(100)
    with Allocated() as allocated:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second = given[:50] + 1  # a view of what was given, and 200 bytes
        second.view(torch.uint8)[:40].clone()
    assert (allocated.peak, allocated.now) == (1000, 200)


def specs() -> dict[str, Spec | FlatSpec]:
    """Layouts of every kind on 6 ranks."""

    def on(mesh: ProcessMesh = MESH, **placements: Placement) -> Spec:
        return Spec.from_axes(mesh, placements)

    ragged = Spec.from_axes(MESH, {"ep": Shard(0)}, sizes={"ep": (2, 0, 11)})
    return {
        "replicated": on(),
        "uneven": on(ep=Shard(0)),
        "nested": on(dp=Shard(1), ep=Shard(1)),
        "ordered": Spec.from_dims(MESH, [None, None, ("ep", "dp")]),
        "ragged": ragged,
        "flat": FlatSpec(ragged, ("dp",)),
        "flat ragged": FlatSpec(on(), ("ep", "dp"), sizes=(0, 5, 400, 1, 40, 100)),
        "one stage": on(MESH.submesh("ep", of={"dp": 1}), ep=Shard(1)),
        "other stage": on(MESH.submesh("ep", of={"dp": 0}), ep=Shard(0)),
    }


def due() -> dict[str, Spec | FlatSpec]:
    """Layouts whose values are still to be reduced."""
    return {
        "sum": Spec.from_axes(MESH, {"dp": Partial()}),
        "sum of shards": Spec.from_axes(MESH, {"dp": Shard(0), "ep": Partial("avg")}),
        "max of sums": Spec.from_axes(MESH, {"dp": Partial("max"), "ep": Partial()}),
        "flat sum": FlatSpec(Spec.from_axes(MESH, {"ep": Partial()}), ("dp",)),
    }


def pairs(dtype: torch.dtype = torch.float32) -> list[tuple[str, TensorSpec, TensorSpec]]:
    known = {**specs(), **due()}
    return [
        (f"{a} -> {b}", TensorSpec(SHAPE, dtype, known[a]), TensorSpec(SHAPE, dtype, known[b]))
        for a in known
        for b in specs()
        if a != b
    ]


def factor(tensor: TensorSpec, rank: int) -> float:
    """What a rank's addend is of the whole: 1, 2, ... by its place among the addends."""
    at = tensor.mesh.coordinate(rank)
    place = 0
    for axis in tensor.partials:
        place = place * tensor.mesh.axis_size(axis) + at[axis]
    return float(place + 1)


def reduced_factor(tensor: TensorSpec) -> float:
    """What all addends make of a whole that is nowhere below zero."""
    sizes = [tensor.mesh.axis_size(axis) for axis in tensor.partials]
    values = torch.arange(1.0, math.prod(sizes) + 1).view(sizes)
    for kind in reversed(tensor.partials.values()):
        values = {"sum": values.sum, "avg": values.mean, "max": values.amax}[kind](-1)
    return float(values)


def part_of(whole: torch.Tensor, tensor: TensorSpec, rank: int) -> torch.Tensor | None:
    if tensor.mesh.position(rank) is None:
        return None
    part = whole[tensor.box(rank).slices()].clone()
    begin, end = tensor.flat_range(rank)
    return part.flatten()[begin:end].clone() if isinstance(tensor.spec, FlatSpec) else part


def num_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


@pytest.mark.parametrize("buffer_bytes", [2**25, 300])
def test_execute_allocates_what_the_plan_says_and_no_more_than_both_blocks(
    buffer_bytes: int,
) -> None:
    """Beside the target: no more than `buffer_bytes`, nor than source and target, or 1 MiB."""
    whole = torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE)
    cases = random.sample(pairs(), 40)
    plans = [plan_reshard(a, b, buffer_bytes=buffer_bytes) for _, a, b in cases]
    peaks = [plan.peak_bytes for plan in plans]

    def fn(rank: int, world_size: int) -> None:
        for (name, source, target), plan, peak in zip(cases, plans, peaks, strict=True):
            local = part_of(whole, source, rank)
            if local is not None:
                local = local * factor(source, rank)
            with Allocated() as allocated:
                found = execute(plan, local)
            expected = part_of(whole, target, rank)
            if expected is not None:
                expected = expected * reduced_factor(source)
            assert (found is None) == (expected is None), name
            assert found is None or torch.equal(found, expected), name
            assert allocated.peak == peak.get(rank, 0), f"{name}, rank {rank}"
            between = sum(  # a layout on the way is kept, until the next step has been made of it
                math.prod(t.local_shape(rank)) * 4
                for step in plan.steps[1:]
                for t in step.sources
                if t.mesh.position(rank) is not None
            )
            blocks = num_bytes(local) + num_bytes(found)
            # A message is cut between elements, so that a turn may have one more of each.
            room = min(buffer_bytes, max(blocks + between, 2**20)) + 4 * 4 * world_size
            assert allocated.peak <= num_bytes(found) + between + room, f"{name}, rank {rank}"

    run_ranks(fn, 6, timeout_s=120)


def test_lists_of_strided_tensors_of_several_types_need_no_copies() -> None:
    """Partial, resting and moving tensors in one plan of two steps; messages of odd bytes."""
    layouts, dues = specs(), due()
    ends = [
        (
            torch.float64,
            dues["sum of shards"],
            layouts["replicated"],
        ),  # scattered first, then gathered
        (torch.uint8, layouts["ragged"], layouts["nested"]),
        (torch.bfloat16, layouts["uneven"], layouts["uneven"]),  # rests
        (torch.float32, layouts["flat"], layouts["ordered"]),
        (torch.complex64, layouts["ordered"], layouts["flat ragged"]),
    ]
    sources = [TensorSpec(SHAPE, dtype, a) for dtype, a, _ in ends]
    targets = [TensorSpec(SHAPE, dtype, b) for dtype, _, b in ends]
    plans = [plan_reshard(sources, targets, buffer_bytes=n) for n in (2**25, 1000)]
    peaks = [plan.peak_bytes for plan in plans]
    assert [len(plan.steps) for plan in plans] == [2, 2] and plans[1].steps[0].rounds > 4
    numbers = torch.arange(math.prod(SHAPE)).view(SHAPE)
    wholes = [(numbers % 100).to(dtype) for dtype, _, _ in ends]

    def fn(rank: int, world_size: int) -> None:
        given = [strided(part_of(w, t, rank)) for w, t in zip(wholes, sources, strict=True)]
        assert not any(local is None or local.is_contiguous() for local in given if local.numel())
        given[0] = given[0] * factor(sources[0], rank)
        for plan, peak in zip(plans, peaks, strict=True):
            with Allocated() as allocated:
                found = execute(plan, given)
            assert allocated.peak == peak[rank]
            for number, part in enumerate(found):
                expected = part_of(wholes[number], targets[number], rank)
                times = reduced_factor(sources[number]) if number == 0 else 1
                assert torch.equal(part, expected * times), f"tensor {number}, rank {rank}"

    run_ranks(fn, 6, timeout_s=120)


def strided(local: torch.Tensor | None) -> torch.Tensor:
    """The same values, every second element of a larger tensor."""
    assert local is not None
    room = torch.zeros((*local.shape, 2), dtype=local.dtype)
    room[..., 0] = local
    return room[..., 0]


def test_more_addends_are_not_more_work_for_each_of_them() -> None:
    """Addends that several ranks hold: what their tiles meet is looked at once, not by addend."""

    def looks(addends: int) -> int:
        mesh = ProcessMesh((addends, 4), ("dp", "ep"))
        due = TensorSpec((addends, 8), torch.float32, Spec(mesh, (Partial(), Replicate())))
        cut = TensorSpec(due.shape, due.dtype, Spec(mesh, (Shard(0), Shard(1))))
        (step,) = plan_reshard(due, cut).steps
        profile = cProfile.Profile()
        profile.runcall(schedule_of, step, 1)
        named = pstats.Stats(profile).get_stats_profile().func_profiles
        return int(named["meeting"].ncalls.partition("/")[0])

    assert looks(32) < 3 * looks(16)


def test_buffers_of_no_bytes_are_refused() -> None:
    one = TensorSpec(SHAPE, torch.float32, specs()["ragged"])
    with pytest.raises(MeshValueError, match="buffer_bytes is 0; give a number of bytes above"):
        plan_reshard(one, one, buffer_bytes=0)
    with pytest.raises(MeshTypeError, match="buffer_bytes must be a number of bytes"):
        plan_reshard(one, one, buffer_bytes=1.5)  # type: ignore[arg-type]

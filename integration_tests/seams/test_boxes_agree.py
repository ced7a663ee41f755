"""The boxes of mesh_spmd against torch's DTensor, on real gloo ranks and with uneven sizes."""

import math
import random

import pytest
import torch
import torch._dynamo  # torch imports it late: once here, not in each forked rank
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mesh_spmd import Box, ProcessMesh, Spec, choose_placements, local_box
from ranktest import run_ranks

CASES_PER_MESH = 40


def random_layout(
    chance: random.Random, num_axes: int, *, partial: bool
) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    sizes = tuple(chance.choice([0, 1, 2, 3, 5, 7, 8, 12, 13]) for _ in range(chance.randint(1, 3)))
    kinds: list[Placement] = [Replicate()] + [Shard(dim) for dim in range(len(sizes))] * 2
    if partial:
        kinds += [Partial()]
    return sizes, tuple(chance.choice(kinds) for _ in range(num_axes))


@pytest.mark.parametrize("shape", [(6,), (3, 2), (1, 2, 3)])
def test_boxes_are_where_distribute_tensor_puts_the_elements(shape: tuple[int, ...]) -> None:
    seed = random.randrange(2**32)
    mesh = ProcessMesh(shape, ("pp", "dp", "ep")[-len(shape) :])

    def fn(rank: int, world_size: int) -> None:
        chance = random.Random(seed)
        device_mesh = mesh.to_device_mesh("cpu")
        for number in range(CASES_PER_MESH):
            sizes, placements = random_layout(chance, len(shape), partial=False)
            case = f"seed {seed}, case {number}: {sizes} {placements} on {mesh}"
            whole = torch.arange(math.prod(sizes)).reshape(sizes)
            held = distribute_tensor(whole, device_mesh, placements).to_local()
            box = local_box(sizes, Spec(mesh, placements), rank)
            assert tuple(held.shape) == box.shape, case
            assert torch.equal(held, whole[box.slices()]), case
        dist.barrier()

    run_ranks(fn, 6)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_boxes_with_partial_equal_torchs_shapes_and_offsets(shape: tuple[int, ...]) -> None:
    seed = random.randrange(2**32)
    mesh = ProcessMesh(shape, ("dp", "ep")[-len(shape) :])

    def fn(rank: int, world_size: int) -> None:
        chance = random.Random(seed)
        device_mesh = mesh.to_device_mesh("cpu")
        for number in range(CASES_PER_MESH):
            sizes, placements = random_layout(chance, len(shape), partial=True)
            shape_, offset = compute_local_shape_and_global_offset(sizes, device_mesh, placements)
            box = local_box(sizes, Spec(mesh, placements), rank)
            expected = Box(tuple(offset), tuple(shape_))
            assert box == expected, f"seed {seed}, case {number}: {sizes} {placements} on {mesh}"
        dist.barrier()

    run_ranks(fn, 4)


def test_a_dtensor_built_from_boxes_is_the_whole_tensor() -> None:
    seed = random.randrange(2**32)
    mesh = ProcessMesh((3, 2), ("dp", "ep"))

    def fn(rank: int, world_size: int) -> None:
        chance = random.Random(seed)
        device_mesh = mesh.to_device_mesh("cpu")
        for sizes in [(7, 3), (2, 5), (13,), (6, 4)]:
            wanted = {axis: chance.randrange(len(sizes)) for axis in mesh.axis_names}
            uneven = tuple(Shard(dim) for dim in wanted.values())
            for placements in (uneven, choose_placements(sizes, mesh, shard=wanted)):
                check_round_trip(
                    device_mesh, sizes, placements, f"seed {seed}: {sizes} {placements}"
                )
        dist.barrier()

    run_ranks(fn, 6)


def check_round_trip(
    device_mesh: DeviceMesh, sizes: tuple[int, ...], placements: tuple[Placement, ...], case: str
) -> None:
    whole = torch.arange(float(math.prod(sizes))).reshape(sizes)
    box = local_box(
        sizes, Spec(ProcessMesh.from_device_mesh(device_mesh), placements), dist.get_rank()
    )
    built = DTensor.from_local(
        whole[box.slices()].contiguous(),
        device_mesh,
        placements,
        shape=whole.shape,
        stride=whole.stride(),
    )
    assert torch.equal(built.full_tensor(), whole), case

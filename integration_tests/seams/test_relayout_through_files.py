"""Experts and flat optimizer states in another layout: moved by mesh-spmd, and through files.

Both ways, on running ranks, end in the same bytes: a plan between ranks, and a checkpoint of
unified-ckpt that is saved in one layout and loaded in the other.
"""

import random
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from comm_collectives.collectives.drop_in import all_to_all_single
from mesh_spmd import FlatSpec, ProcessMesh, Spec, TensorSpec, execute, plan_reshard
from mesh_spmd.creation import randn
from ranktest import run_ranks
from unified_ckpt import Box, LoadOptions, SaveOptions, load, save

RANKS, SHAPE = 4, (16, 3, 5)


def states_of(ep: int, parts: list[int] | None) -> dict[str, TensorSpec]:
    mesh = ProcessMesh((RANKS // ep, ep), ("dp", "ep"))
    spec = Spec.from_axes(mesh, {"ep": Shard(0)}, sizes={"ep": parts} if parts else None)
    return {
        "experts": TensorSpec(SHAPE, torch.bfloat16, spec),
        "moment": TensorSpec(SHAPE, torch.float32, FlatSpec(spec, ("dp",))),
    }


def test_both_ways_end_in_the_same_bytes(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    chance = random.Random(seed)

    def ragged(ep: int) -> list[int]:
        cuts = sorted(chance.randint(0, SHAPE[0]) for _ in range(ep - 1))
        return [b - a for a, b in pairwise([0, *cuts, SHAPE[0]])]

    ways = [
        states_of(2, None),
        states_of(4, ragged(4)),
        states_of(1, None),
        states_of(2, ragged(2)),
    ]

    def fn(rank: int, world_size: int) -> None:
        def box_in(states: dict[str, TensorSpec], key: str) -> Box:
            tensor = states[next(name for name in states if name in key)]
            box = tensor.box(rank)
            flat = tensor.flat_range(rank) if isinstance(tensor.spec, FlatSpec) else None
            return Box(tensor.shape, box.offset, box.shape, flat)

        held = {name: randn(tensor, rank, seed=seed) for name, tensor in ways[0].items()}
        for number, (before, after) in enumerate(pairwise(ways)):
            plan = plan_reshard(list(before.values()), list(after.values()))
            moved = dict(zip(after, execute(plan, list(held.values())), strict=True))
            folder = str(tmp_path / f"checkpoint-{number}")
            save(
                {"model": held},
                checkpoint_id=folder,
                options=SaveOptions(layout=lambda key, _, at=before: box_in(at, key)),
            )
            read = {name: torch.zeros_like(tensor) for name, tensor in moved.items()}
            load(
                {"model": read},
                checkpoint_id=folder,
                options=LoadOptions(layout=lambda key, _, at=after: box_in(at, key)),
            )
            for name, tensor in after.items():
                expected = randn(tensor, rank, seed=seed)
                case = f"seed {seed}, step {number}, rank {rank}: {name}"
                assert torch.equal(moved[name], expected), case
                assert torch.equal(read[name], expected), f"{case} through files"
            held = moved
        dist.barrier()

    run_ranks(fn, RANKS, timeout_s=180)


def test_comm_collectives_carries_a_plan() -> None:
    def fn(rank: int, world_size: int) -> None:
        before, after = states_of(2, None), states_of(4, [9, 0, 4, 3])
        plan = plan_reshard(list(before.values()), list(after.values()))
        local = [randn(tensor, rank, seed=1) for tensor in before.values()]
        moved = execute(plan, local, exchange=all_to_all_single)
        for found, tensor in zip(moved, after.values(), strict=True):
            assert torch.equal(found, randn(tensor, rank, seed=1))

    run_ranks(fn, RANKS)

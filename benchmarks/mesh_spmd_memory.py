"""What `execute` allocates on running ranks, by storage, over the plan and over the blocks.

Two figures. `differences`: of all pairs of layouts of the package's test (uneven, nested, ordered,
ragged, flat, sub-meshes, partial) on 6 gloo ranks, with default and with small buffers, the ranks
on which the count is not the plan's `peak_bytes`. `blocks`: for tensors whose parts are larger than
the default buffers, on 4 gloo ranks, the most that a rank allocates, its target included, over its
source and target blocks together.

    python benchmarks/mesh_spmd_memory.py
"""

import json
import sys
from types import ModuleType

import torch
from loading import load_test
from torch.distributed.tensor import Partial, Replicate, Shard

from mesh_spmd import FlatSpec, ProcessMesh, Spec, TensorSpec, execute, plan_reshard
from mesh_spmd.reshard import Plan
from ranktest import run_ranks

SMALL_BYTES = 300
LARGE = (64, 1024, 1024)  # float32: 256 MiB
RANKS = 4


def main() -> int:
    """Print both figures as JSON."""
    tests = load_test("mesh-spmd", "reshard/test_turns")
    counts = _differences(tests)
    _report("differences", "ranks", sum(counts), len(counts), counts)
    ratios = _blocks(tests)
    _report("blocks", "x", max(ratios), len(ratios), ratios)
    return 0


def _differences(tests: ModuleType) -> list[int]:
    """For each pair and size of buffers, the ranks whose count is not that of the plan."""
    cases = tests.pairs()
    plans = [
        plan_reshard(a, b, **limit)
        for _, a, b in cases
        for limit in ({}, {"buffer_bytes": SMALL_BYTES})
    ]
    measured = _measured(tests, plans, 6)
    return [
        sum(found[rank] != plan.peak_bytes.get(rank, 0) for rank in range(6))
        for plan, found in zip(plans, measured, strict=True)
    ]


def _blocks(tests: ModuleType) -> list[float]:
    """What ranks allocate over their blocks, for each pair and rank."""
    mesh = ProcessMesh((2, 2), ("dp", "ep"))
    ragged = Spec.from_axes(mesh, {"ep": Shard(0)}, sizes={"ep": (17, 47)})
    layouts = [
        Spec(mesh, (Shard(0), Shard(0))),
        Spec(mesh, (Shard(1), Shard(2))),
        Spec(mesh, (Replicate(), Shard(1))),
        Spec(mesh, (Replicate(), Replicate())),
        ragged,
        FlatSpec(ragged, ("dp",)),
    ]
    due = [Spec(mesh, (Partial(), Shard(0))), Spec(mesh, (Partial("max"), Partial()))]
    pairs = [(a, b) for a in (*layouts, *due) for b in layouts if a != b]
    plans = [
        plan_reshard(*(TensorSpec(LARGE, torch.float32, spec) for spec in pair)) for pair in pairs
    ]
    measured = _measured(tests, plans, RANKS)
    return [
        found[rank] / plan.block_bytes[rank]
        for plan, found in zip(plans, measured, strict=True)
        for rank in range(RANKS)
    ]


def _measured(tests: ModuleType, plans: list[Plan], world_size: int) -> list[list[int]]:
    """For each plan the most bytes that each rank allocated at one time."""

    def fn(rank: int, world_size: int) -> list[int]:
        found = []
        for plan in plans:
            (source,) = plan.sources
            local = None
            if source.mesh.position(rank) is not None:
                local = torch.ones(source.local_shape(rank), dtype=source.dtype)
            with tests.Allocated() as allocated:
                execute(plan, local)
            found.append(allocated.peak)
        return found

    by_rank = run_ranks(fn, world_size, timeout_s=1800)
    return [list(found) for found in zip(*by_rank, strict=True)]  # type: ignore[arg-type]


def _report(
    name: str, unit: str, value: float, count: int, all_of: list[int] | list[float]
) -> None:
    report = {
        "figure": f"mesh_spmd_memory_{name}",
        "value": round(value, 5),
        "unit": unit,
        "n": count,
        "low": round(min(all_of), 5),
        "high": round(max(all_of), 5),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

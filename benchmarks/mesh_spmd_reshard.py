"""All pairs of placements: bytes of the busiest rank over the bound, and planning over DTensor's.

The bound comes from the max-flow program of the package's tests. DTensor's planner is the
graph-based one (Dijkstra); both plan with empty caches, ours with the messages of one rank; CPU
time, the median of all pairs that were timed.

    python benchmarks/mesh_spmd_reshard.py bytes
    python benchmarks/mesh_spmd_reshard.py time --pairs 60
    python benchmarks/mesh_spmd_reshard.py gloo --pairs 100
    python benchmarks/mesh_spmd_reshard.py lists

`lists` are 900 random lists of six tensors, with elements of one, two and three sizes. With `gloo`
as many processes as the mesh has ranks carry the plans out; bytes are counted where they are handed
to gloo, and what arrives is compared with the whole tensor.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from loading import load_test
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import _redistribute as redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from mesh_spmd import ProcessMesh, Spec, TensorSpec, execute, plan_reshard
from mesh_spmd.reshard.caches import forget_plans
from ranktest import run_ranks

ROUNDS = 3
MESHES = [(2, 4), (4, 8), (2, 2, 4), (3, 5)]
Pair = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the two measurements and print its figure as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["bytes", "time", "gloo", "lists"])
    parser.add_argument("--pairs", type=int, default=0, help="pairs of each mesh; 0 takes all")
    arguments = parser.parse_args(argv)
    tests = load_test("mesh-spmd", "reshard/test_plan")
    if arguments.what == "lists":
        return _lists(tests)
    ratios: list[float] = []
    for mesh_shape in MESHES:
        mesh = ProcessMesh(mesh_shape, tuple("abc"[: len(mesh_shape)]))
        pairs = list(itertools.permutations(tests.all_placements(mesh, 3), 2))
        if arguments.pairs:
            pairs = random.sample(pairs, min(arguments.pairs, len(pairs)))
        for shape in [(8, 8, 16), (7, 5, 3)]:
            if arguments.what == "gloo":
                ratios += _running(mesh, shape, pairs, tests)
            else:
                measure = _bytes if arguments.what == "bytes" else _planning
                ratios += [measure(mesh, shape, pair, tests) for pair in pairs]
            print(f"{mesh_shape} {shape}: {len(pairs)} pairs, worst {max(ratios)}", file=sys.stderr)
    value = statistics.median(ratios) if arguments.what == "time" else max(ratios)
    report = {
        "figure": f"mesh_spmd_reshard_{arguments.what}",
        "value": round(value, 5),
        "unit": "x",
        "n": len(ratios),
        "low": round(min(ratios), 5),
        "high": round(max(ratios), 5),
    }
    print(json.dumps(report))
    return 0


def _lists(tests: Any) -> int:
    """Print how far busiest senders of lists are above the bound."""
    seed = random.randrange(2**32)
    print(f"seed {seed}", file=sys.stderr)
    chance = random.Random(seed)
    over = [
        tests.elements_over(tests.random_list(chance, dtypes), f"seed {seed}")
        for dtypes in (tests.ONE_SIZE, tests.TWO_SIZES, tests.THREE_SIZES)
        for _ in range(300)
    ]
    figure = {"figure": "mesh_spmd_reshard_lists", "value": max(over), "unit": "elements"}
    print(json.dumps({**figure, "n": len(over)}))
    return 0


def _bytes(mesh: ProcessMesh, shape: tuple[int, ...], pair: Pair, tests: object) -> float:
    """The worse of received and sent bytes of the busiest rank, over the bound."""
    source, target = (TensorSpec(shape, torch.float32, Spec(mesh, p)) for p in pair)
    return _over_the_limit(plan_reshard(source, target).busiest_bytes, source, target, tests)


def _over_the_limit(
    busiest: tuple[int, int], source: TensorSpec, target: TensorSpec, tests: object
) -> float:
    owned = [(tests.owned(source), tests.owned(target), 4)]  # type: ignore[attr-defined]
    limits = (tests.busiest_receiver(owned), tests.busiest_sender(owned))  # type: ignore[attr-defined]
    return max(
        moved / limit if limit else float(moved + 1)
        for moved, limit in zip(busiest, limits, strict=True)
    )


def _running(
    mesh: ProcessMesh, shape: tuple[int, ...], pairs: list[Pair], tests: object
) -> list[float]:
    """As `_bytes`, with the bytes that running ranks give to gloo and get from it."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    ends = [[TensorSpec(shape, torch.float32, Spec(mesh, p)) for p in pair] for pair in pairs]

    def fn(rank: int, world_size: int) -> list[tuple[int, int]]:
        counted: list[tuple[int, int]] = []

        def exchange(output: torch.Tensor, input: torch.Tensor, **options: object) -> None:
            received, sent = counted[-1]
            counted[-1] = (received + output.numel(), sent + input.numel())
            dist.all_to_all_single(output, input, **options)

        for source, target in ends:
            counted.append((0, 0))
            local = whole[source.box(rank).slices()]
            found = execute(plan_reshard(source, target), local, exchange=exchange)
            if not torch.equal(found, whole[target.box(rank).slices()]):
                raise RuntimeError(f"rank {rank} has other values: {source} -> {target}")
        return counted

    by_rank = run_ranks(fn, mesh.size, timeout_s=1800)
    ratios = []
    for (source, target), *counts in zip(ends, *by_rank, strict=True):  # type: ignore[arg-type]
        busiest = (max(c[0] for c in counts), max(c[1] for c in counts))
        ratios.append(_over_the_limit(busiest, source, target, tests))
    return ratios


def _planning(mesh: ProcessMesh, shape: tuple[int, ...], pair: Pair, tests: object) -> float:
    """CPU time of our plan over that of DTensor's."""
    device_mesh = DeviceMesh(
        "cpu", torch.arange(mesh.size).view(mesh.shape), _init_backend=False, _rank=0
    )
    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
    specs = [DTensorSpec(device_mesh, p, tensor_meta=meta) for p in pair]
    source, target = (TensorSpec(shape, torch.float32, Spec(mesh, p)) for p in pair)

    def theirs() -> None:
        redistribute._gen_transform_infos_non_cached(*specs, use_graph_based_transform=True)

    def ours() -> None:
        plan = plan_reshard(source, target)
        plan.sends(0), plan.receives(0), plan.copies(0)

    forget_theirs = redistribute.clear_redistribute_planner_cache
    return _cpu_s(ours, forget_plans) / _cpu_s(theirs, forget_theirs)


def _cpu_s(run: Callable[[], None], forget: Callable[[], None]) -> float:
    """The least of some rounds, each with empty caches."""
    found = []
    for _ in range(ROUNDS):
        forget()
        begun = time.process_time()
        run()
        found.append(time.process_time() - begun)
    return max(min(found), 1e-9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

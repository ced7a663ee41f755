"""A plan of 4,096 ranks and 10,000 tensors in one process: CPU time, memory, and one hash.

Every tensor has another shape. Several processes, each with another seed of Python's hashes, plan
the same and then derive the messages of one sampled rank for some tensors; the worst one counts.

    python benchmarks/mesh_spmd_scale.py --ranks 4096 --tensors 10000
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Shard

from mesh_spmd import ProcessMesh, Spec, TensorSpec, plan_reshard

SAMPLED_RANKS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes; print seconds, bytes and the number of different hashes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--view", type=int, default=None, help="plan here, for this rank")
    arguments = parser.parse_args(argv)
    if arguments.view is not None:
        print(json.dumps(view(arguments.ranks, arguments.tensors, arguments.view)))
        return 0
    found = []
    for rank in random.sample(range(arguments.ranks), SAMPLED_RANKS):
        done = subprocess.run(
            [
                *(sys.executable, __file__, "--view", str(rank)),
                *("--ranks", str(arguments.ranks), "--tensors", str(arguments.tensors)),
            ],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(rank), "OMP_NUM_THREADS": "1"},
        )
        found.append(json.loads(done.stdout))
    for name, unit in (("seconds", "s"), ("gigabytes", "GB")):
        values = [one[name] for one in found]
        report = {"figure": f"mesh_spmd_scale_{name}", "value": max(values), "unit": unit}
        print(json.dumps({**report, "n": len(found), "low": min(values), "high": max(values)}))
    hashes = len({one["hash"] for one in found})
    report = {"figure": "mesh_spmd_scale_hashes", "value": hashes, "unit": "hashes"}
    print(json.dumps({**report, "n": len(found), "low": hashes, "high": hashes}))
    return 0


def view(num_ranks: int, num_tensors: int, rank: int) -> dict[str, object]:
    """Plan everything, then one rank's messages of the first tensors."""
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    mesh = ProcessMesh((8, 8, num_ranks // 64), ("pp", "dp", "ep"))
    old = Spec.from_axes(mesh, {"ep": Shard(0), "dp": Shard(1)})
    new = Spec.from_axes(mesh, {"ep": Shard(1), "pp": Shard(0)})
    chance = random.Random(0)
    shapes = [(chance.randint(64, 4096), chance.randint(64, 2048)) for _ in range(num_tensors)]
    source, target = (
        [TensorSpec(shape, torch.bfloat16, spec) for shape in shapes] for spec in (old, new)
    )
    plan = plan_reshard(source, target)
    found = plan.hash
    seconds = time.process_time() - begun
    some = plan_reshard(source[:20], target[:20])
    sent = sum(p.end - p.begin for p in some.sends(rank)) * 2
    got = sum(p.end - p.begin for p in some.receives(rank)) * 2
    if (sent, got) != (some.sent_bytes[rank], some.received_bytes[rank]):
        raise RuntimeError(f"rank {rank} sends {sent} and receives {got} bytes, not the plan's")
    after_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(seconds, 1),
        "gigabytes": round((after_bytes - before_bytes) * 1024 / 1e9, 3),
        "hash": found,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

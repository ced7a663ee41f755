"""Random operations on both cores at once: how many of them broke a rule or were decided twice.

    python benchmarks/gpu_alloc_sound.py [--operations 1000000]

The rules are those of packages/gpu-alloc/tests/core/test_allocator_state_machine.py: three streams,
two pools, limits, slabs, events that are pending, graphs being captured, finalizers that free while
a chunk is taken. After every operation the Python core and the compiled one must have answered
alike and hold the same blocks, and an independent checker looks at all of them. Seeds are fresh; a
failure ends the run and names its seed. One process for each core of the machine.
"""

import argparse
import json
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1] / "packages/gpu-alloc/tests/core"
STEPS = 50  # of one allocator
BATCH = 200  # allocators


def run_batch(seed: int) -> int:
    """Operations done with the seeds from `seed` on."""
    sys.path.insert(0, str(TESTS))
    from test_allocator_state_machine import BothCoresMachine, run_drawn

    for number in range(BATCH):
        run_drawn(BothCoresMachine, seed + number, STEPS)
    return BATCH * STEPS


def main() -> None:
    """Run batches until so many operations are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=1_000_000)
    batches = -(-parser.parse_args().operations // (BATCH * STEPS))
    first = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {first}", flush=True)
    done = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for count in pool.map(run_batch, range(first, first + batches * BATCH, BATCH)):
            done += count
            print(f"{done} operations", flush=True)
    print(json.dumps({"figure": "gpu_alloc_sound_operations", "value": done, "unit": "operations"}))


if __name__ == "__main__":
    main()

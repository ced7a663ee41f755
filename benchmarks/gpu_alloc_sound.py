"""Random operations on both cores at once: how many of them broke a rule or were decided twice.

    python benchmarks/gpu_alloc_sound.py [--operations 1000000]

The state machine is that of packages/gpu-alloc/tests/core/test_allocator_state_machine.py: three
streams, two pools, limits, slabs, events that are pending, graphs being captured, finalizers that
free while a chunk is taken. After every operation the Python core and the compiled one must have
answered alike and hold the same blocks, and an independent checker looks at all of them.
Seeds are fresh; hypothesis prints the one of a failure, which ends the run.
"""

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "packages/gpu-alloc/tests/core"
STEPS = 50


def main() -> None:
    """Run the machine until so many operations are done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=1_000_000)
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from test_allocator_state_machine import BothCoresMachine, run_machine

    done = 0

    class Counting(BothCoresMachine):
        def check_invariants(self, *given: object, **named: object) -> None:
            nonlocal done
            done += 1
            super().check_invariants(*given, **named)

    while done < arguments.operations:
        run_machine(Counting, examples=1000, steps=STEPS)
        print(f"{done} operations", flush=True)
    print(json.dumps({"figure": "gpu_alloc_sound_operations", "value": done, "unit": "operations"}))


if __name__ == "__main__":
    main()

"""Threads on torch served by us, for a minute in each of the two ways.

    python benchmarks/gpu_alloc_torch_threads.py [--seconds 60]

The program is that of packages/gpu-alloc/tests/torch/on_stub.py, on devicetest's stub of CUDA. The
figure is the seconds that ended without a hang, a failure or a tensor at address 0, of both ways
together; 0 as soon as one of them has one.
"""

import argparse
import json
from pathlib import Path

from devicetest.cuda_stub import run_on_stub

PROGRAM = Path(__file__).parents[1] / "packages/gpu-alloc/tests/torch/on_stub.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    seconds = parser.parse_args().seconds
    good = 0.0
    for mode in ("replace", "segments"):
        limit = seconds + 600
        done = run_on_stub(str(PROGRAM), mode, str(seconds), gpu_bytes=1 << 30, timeout_s=limit)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found = json.loads(done.stdout)["threads"]
        print(f"{mode}: {found}")
        if found["hung"] or found["failures"]:
            good = 0.0
            break
        good += seconds
    print(json.dumps({"figure": "gpu_alloc_torch_threads_seconds", "value": good, "unit": "s"}))


if __name__ == "__main__":
    main()

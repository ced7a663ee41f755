"""What an allocation and its free cost, beside torch's own allocator.

    python benchmarks/gpu_alloc_speed.py [--rounds 5]

torch's raw allocation is called from Python in both cases, on devicetest's stub of CUDA: once with
torch's caching allocator behind it, once with ours (`gpu_alloc.torch.replace`), in processes that
take turns, among 100 and among 100,000 free blocks. The Python core is called as a program calls
it, in the first of these processes' place. Figures are ratios of CPU time.
"""

import argparse
import json
import statistics
import time

from devicetest.cuda_stub import StubUnavailableError, run_on_stub
from gpu_alloc import AddressSource, AllocatorConfig, TwoPoolAllocator
from gpu_alloc.native import NativeAllocator

PROGRAM = __file__.replace("gpu_alloc_speed", "gpu_alloc_torch_on_stub")


def on_stub(*words: str) -> list[float]:
    done = run_on_stub(PROGRAM, "speed", *words)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: list[float] = json.loads(done.stdout)
    return found


def core_ns(kind: type[TwoPoolAllocator] | type[NativeAllocator]) -> float:
    """CPU time of a pair of calls of a core that a Python program holds."""
    allocator = kind(AddressSource(), AllocatorConfig())
    best = float("inf")
    for _ in range(7):
        start = time.thread_time()
        for size in range(512, 102_912, 51):
            allocator.free(allocator.malloc(size).ptr)
        best = min(best, (time.thread_time() - start) / 2008)
    return best * 1e9


def report(figure: str, values: list[float]) -> None:
    record = {"figure": figure, "value": round(statistics.median(values), 3), "unit": "x"}
    record |= {"low": round(min(values), 3), "high": round(max(values), 3), "n": len(values)}
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    native, flat, from_python, python = [], [], [], []
    for _ in range(parser.parse_args().rounds):
        try:
            torchs, ours = on_stub(), on_stub("replace")
        except StubUnavailableError as error:
            print(f"no stub of CUDA here, nothing is measured: {error}")
            return
        native.append(max(ours[0] / torchs[0], ours[1] / torchs[1]))
        flat.append(ours[1] / ours[0])
        from_python.append(core_ns(NativeAllocator) / torchs[0])
        python.append(core_ns(TwoPoolAllocator) / torchs[0])
    report("gpu_alloc_native_over_torch", native)
    report("gpu_alloc_native_scaling", flat)
    report("gpu_alloc_native_from_python_over_torch", from_python)
    report("gpu_alloc_python_over_torch", python)


if __name__ == "__main__":
    main()

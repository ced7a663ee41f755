"""What an allocation and its free cost, beside torch's own allocator.

    python benchmarks/gpu_alloc_speed.py [--rounds 5]

torch's raw allocation is called from Python in both cases, on devicetest's stub of CUDA: once with
torch's caching allocator behind it, once with ours (`gpu_alloc.torch.replace`), in processes that
take turns, among 100 and among 100,000 free blocks. The Python core is called as a program calls
it, in the first of these processes' place. CuPy's is the call that CuPy makes of the allocator
which `cupy.cuda.set_allocator` was given, and the drop of what it returns: the pool's malloc,
CuPy's own memory objects, its look-ups of hooks, the block's end. The current device and stream,
which a GPU's driver is asked for, are not in it: `HostBackend` answers. CuPy's own pool asks a
driver at every call, so it cannot be measured beside it. Figures are ratios of CPU time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

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

    def pairs() -> None:
        for size in range(512, 102_912, 51):
            allocator.free(allocator.malloc(size).ptr)

    return best_ns(pairs)


def cupy_ns() -> float:
    """CPU time of CuPy's call of its allocator and the drop of the memory, with our pool there."""
    import cupy

    from gpu_alloc.cupy import CupyPool, HostBackend

    pool = CupyPool(AllocatorConfig(), backend=HostBackend())
    cupy.cuda.set_allocator(pool.malloc)
    allocate = cupy.cuda.get_allocator()

    def pairs() -> None:
        for size in range(512, 102_912, 51):
            allocate(size)

    try:
        found = best_ns(pairs)
    finally:
        cupy.cuda.set_allocator(None)
    stats = pool.stats()
    if stats.allocated_bytes or not stats.allocated_peak_bytes:
        raise RuntimeError(f"the pool did not serve CuPy, or kept a block: {stats}")
    return found


def best_ns(pairs: Callable[[], None]) -> float:
    """CPU time of one of 2008 pairs of calls; the best of rounds."""
    best = float("inf")
    for _ in range(7):
        start = time.thread_time()
        pairs()
        best = min(best, (time.thread_time() - start) / 2008)
    return best * 1e9


def report(figure: str, values: list[float]) -> None:
    record = {"figure": figure, "value": round(statistics.median(values), 3), "unit": "x"}
    record |= {"low": round(min(values), 3), "high": round(max(values), 3), "n": len(values)}
    print(json.dumps(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    native, flat, from_python, from_cupy, python = [], [], [], [], []
    for _ in range(parser.parse_args().rounds):
        try:
            torchs, ours = on_stub(), on_stub("replace")
        except StubUnavailableError as error:
            print(f"no stub of CUDA here, nothing is measured: {error}")
            return
        native.append(max(ours[0] / torchs[0], ours[1] / torchs[1]))
        flat.append(ours[1] / ours[0])
        from_python.append(core_ns(NativeAllocator) / torchs[0])
        from_cupy.append(cupy_ns() / torchs[0])
        python.append(core_ns(TwoPoolAllocator) / torchs[0])
    report("gpu_alloc_native_over_torch", native)
    report("gpu_alloc_native_scaling", flat)
    report("gpu_alloc_native_from_python_over_torch", from_python)
    report("gpu_alloc_cupy_over_torch", from_cupy)
    report("gpu_alloc_python_over_torch", python)


if __name__ == "__main__":
    main()

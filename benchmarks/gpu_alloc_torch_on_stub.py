"""What torch's own allocator does on a device that is not there; run on devicetest's stub of CUDA.

    python gpu_alloc_torch_on_stub.py capacity trace.jsonl...   # bytes of the smallest device, each
    python gpu_alloc_torch_on_stub.py speed [replace]           # ns of an allocation and its free

`capacity` drives torch's raw allocations through a trace on devices of other sizes, by bisection to
2 MiB. `speed` times the same calls, with our allocator in torch's place on `replace`.
Prints one JSON list.
"""

import ctypes
import json
import random
import sys
import time
import warnings
from collections.abc import Sequence

import torch

from gpu_alloc import AllocatorConfig, TraceEvent, load_trace
from gpu_alloc.torch import replace
from gpu_alloc.trace.requests import Requests

PAGE = 2 << 20
MALLOC = torch._C._cuda_cudaCachingAllocator_raw_alloc
FREE = torch._C._cuda_cudaCachingAllocator_raw_delete


def smallest_device(trace: Sequence[TraceEvent]) -> int:
    """In bytes; nothing else is on the device."""
    stub = ctypes.CDLL(None)
    stub.stub_set_limit.argtypes = [ctypes.c_size_t]

    def runs(pages: int) -> bool:
        stub.stub_set_limit(pages * PAGE)
        live: dict[int, int] = {}
        try:
            for event in trace:
                if event.action == "alloc" and event.size_bytes:
                    live[event.block_id] = MALLOC(event.size_bytes, 0)
                elif event.action == "free" and event.block_id in live:
                    FREE(live.pop(event.block_id))
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            for ptr in live.values():
                FREE(ptr)
            torch.cuda.empty_cache()

    fails = Requests(trace).peak_live_bytes // PAGE - 1
    works = fails * 2 + 64
    while works - fails > 1:
        middle = (works + fails) // 2
        works, fails = (middle, fails) if runs(middle) else (works, middle)
    return works * PAGE


def pair_ns(num_blocks: int) -> float:
    """CPU time of one allocation and its free among so many free blocks; the best of rounds."""
    rng = random.Random(num_blocks)
    held = [MALLOC(rng.randrange(1, 200) * 512, 0) for _ in range(2 * num_blocks)]
    for ptr in held[::2]:
        FREE(ptr)
    sizes = [rng.randrange(1, 200) * 512 for _ in range(2000)]
    best = float("inf")
    for _ in range(7):
        start = time.thread_time()
        for size in sizes:
            FREE(MALLOC(size, 0))
        best = min(best, (time.thread_time() - start) / len(sizes))
    for ptr in held[1::2]:
        FREE(ptr)
    return best * 1e9


def main() -> None:
    warnings.simplefilter("ignore")
    mode, *arguments = sys.argv[1:]
    if mode == "speed" and arguments:
        replace(AllocatorConfig())
    torch.empty(1, device="cuda")
    if mode == "speed":
        print(json.dumps([pair_ns(count) for count in (100, 100_000)]))
    else:
        print(json.dumps([smallest_device(load_trace(path)) for path in arguments]))


if __name__ == "__main__":
    main()

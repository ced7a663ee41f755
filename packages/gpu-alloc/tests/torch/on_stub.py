"""What real torch does on our memory, run in a process on devicetest's stub of CUDA.

    python on_stub.py replace|segments|pages SECONDS

Prints one JSON object of facts; the tests of segments.py and replacement.py say what they must be.
"""

import contextlib
import ctypes
import itertools
import json
import sys
import threading
import time
import warnings
from typing import Any

import torch

from gpu_alloc import AllocatorConfig, AllocError, OutOfMemoryError, check_snapshot
from gpu_alloc.cupy import HostBackend, uninstall, use
from gpu_alloc.torch import memory_stats, replace, segments

MIB = 1 << 20
CONFIG = AllocatorConfig(large_pool_pre_alloc_in_mb=256)


class Threads:
    """Threads that each repeat something for some seconds, and how often they did."""

    def __init__(self, make_pool: Any, stats: Any) -> None:
        self.make_pool, self.stats = make_pool, stats
        self.done: dict[str, int] = {}
        self.failures: list[str] = []
        self.end = False

    def _inside(self) -> Any:
        """A pool is torch's for one thread at a time, so that each has one over the same arena."""
        if self.make_pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self.make_pool())

    def allocate(self, number: int) -> None:
        size = (number * 37 + 1) % 40 * MIB // 4 + 1000 * (number % 7 + 1)
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        if tensor.data_ptr() == 0:
            self.failures.append("a tensor at address 0")

    def run_out(self, number: int) -> None:
        """A request that no device has room for ends in an exception."""
        try:
            tensor = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        except RuntimeError:
            return
        self.failures.append(f"8 GiB were handed out at {tensor.data_ptr():#x}")

    def backward(self, number: int) -> None:
        weight = torch.ones(1000 + number % 5000, device="cuda", requires_grad=True)
        (weight * weight).sum().backward()
        if weight.grad is None or weight.grad.data_ptr() == 0:
            self.failures.append("no gradient")

    def read(self, number: int) -> None:
        self.stats()

    def _repeat(self, name: str, action: Any) -> None:
        try:
            with self._inside():
                while not self.end:
                    action(self.done[name])
                    self.done[name] += 1
                    time.sleep(0)
        except BaseException as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])
            raise

    def run(self, seconds: float) -> dict[str, Any]:
        """Whether each made progress until the end."""
        actions = {"allocate": self.allocate, "allocate too": self.allocate, "read": self.read}
        actions |= {"backward": self.backward, "run out": self.run_out}
        threads = []
        for name, action in actions.items():
            self.done[name] = 0
            threads.append(threading.Thread(target=self._repeat, args=(name, action), daemon=True))
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        late = dict(self.done)
        limit = time.monotonic() + 60  # a hang, not a slow machine
        while (
            time.monotonic() < limit
            and not self.failures
            and any(self.done[n] == late[n] for n in late)
        ):
            time.sleep(0.01)
        hung = [n for n in late if self.done[n] == late[n]]
        self.end = True
        for thread in threads:
            thread.join(60)
        return {"hung": hung, "failures": self.failures[:5], "rounds": self.done}


def facts_of_sharing(share: Any) -> dict[str, Any]:
    """CuPy's arrays beside torch's, in one arena or in torch's cache; {} without CuPy."""
    try:
        import cupy
    except ModuleNotFoundError:
        return {}
    pool = use(CONFIG, backend=HostBackend(), share=share)
    before = torch.cuda.mem_get_info()[0]
    facts: dict[str, Any] = {"used_before": pool.used_bytes()}
    tensors = [torch.empty(8 * MIB, dtype=torch.uint8, device="cuda") for _ in range(12)]
    arrays = [cupy.ndarray((8 * MIB,), "u1") for _ in range(12)]
    both = [(t.data_ptr(), 8 * MIB) for t in tensors] + [(a.data.ptr, a.nbytes) for a in arrays]
    both.sort()
    facts["overlap"] = [a for a, b in itertools.pairwise(both) if a[0] + a[1] > b[0]]
    facts["used"] = pool.used_bytes() - facts["used_before"]
    del tensors
    later = [cupy.ndarray((8 * MIB,), "u1") for _ in range(12)]
    facts["taken_from_the_device"] = before - torch.cuda.mem_get_info()[0]
    try:
        cupy.ndarray((4 << 30,), "u1")
    except OutOfMemoryError as error:
        facts["out_of_memory"] = isinstance(error, cupy.cuda.memory.OutOfMemoryError)
    del arrays, later
    facts["used_after"] = pool.used_bytes() - facts["used_before"]
    uninstall()
    facts["still_there"] = torch.empty(1000, device="cuda").data_ptr() != 0
    return facts


def facts_of_replacement(seconds: float) -> dict[str, Any]:
    arena = replace(CONFIG)
    facts: dict[str, Any] = {"unused": [memory_stats(arena), arena.devices()]}
    tensor = torch.empty(1000, device="cuda")
    large = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    facts["pointer"] = tensor.data_ptr()
    facts["stats"] = memory_stats(arena)
    facts["live_in_snapshot"] = sorted(
        (block.ptr, block.requested_bytes)
        for chunk in arena.allocator(0).snapshot().chunks
        for block in chunk.blocks
        if not block.is_free
    )
    facts["expected_live"] = [[tensor.data_ptr(), 4000], [large.data_ptr(), 3 * MIB]]
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        facts["out_of_memory"] = f"{type(error).__name__}: {error}"
    report = arena.allocator(0).last_report()
    facts["report"] = None if report is None else report.message()
    stream = torch.cuda.Stream()
    large.record_stream(stream)
    del large
    facts["after_free"] = memory_stats(arena)["allocated_bytes.all.current"]
    torch.cuda.empty_cache()
    try:
        replace(AllocatorConfig())
    except AllocError as error:
        facts["other_settings"] = str(error)
    facts["sharing"] = facts_of_sharing("arena")
    facts["threads"] = Threads(None, lambda: memory_stats(arena)).run(seconds)
    facts["problems"] = check_snapshot(arena.allocator(0).snapshot())
    return facts


def facts_of_pages(seconds: float) -> dict[str, Any]:
    """torch on address space with pages behind it, on a device of 1 GiB."""
    stub = ctypes.CDLL(None)
    stub.stub_used.restype = ctypes.c_size_t
    before = stub.stub_used()
    arena = replace(AllocatorConfig(use_virtual_memory=True))
    tensors = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    facts: dict[str, Any] = {"used_by_8": stub.stub_used() - before}
    del tensors[::2]
    large = torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
    starts = sorted((t.data_ptr(), t.numel()) for t in [*tensors, large])
    facts["overlap"] = [a for a, b in itertools.pairwise(starts) if a[0] + a[1] > b[0]]
    facts["used_with_large"] = stub.stub_used() - before
    facts["reserved"] = memory_stats(arena)["reserved_bytes.all.current"]
    try:
        torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        facts["out_of_memory"] = str(error)
    facts["threads"] = Threads(None, lambda: memory_stats(arena)).run(seconds)
    del tensors, large
    torch.cuda.empty_cache()
    held = memory_stats(arena)
    facts["held"] = [held["allocated_bytes.all.current"], held["reserved_bytes.all.current"]]
    facts["used_at_the_end"] = stub.stub_used() - before
    facts["problems"] = check_snapshot(arena.allocator(0).snapshot())
    return facts


def facts_of_segments(seconds: float) -> dict[str, Any]:
    pool = segments(CONFIG)
    facts: dict[str, Any] = {"sharing": facts_of_sharing("torch")}
    torch.cuda.empty_cache()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        facts["allocated"] = torch.cuda.memory_allocated()
        facts["reserved"] = torch.cuda.memory_reserved()
        facts["segments"] = [[s["address"], s["total_size"]] for s in pool.snapshot()]
        facts["pointer"] = tensor.data_ptr()
        try:
            torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            facts["out_of_memory"] = type(error).__name__

    def stats() -> None:
        torch.cuda.memory_allocated()
        torch.cuda.memory_stats()

    facts["threads"] = Threads(lambda: segments(CONFIG), stats).run(seconds)
    return facts


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-4)
    of = {"replace": facts_of_replacement, "segments": facts_of_segments, "pages": facts_of_pages}
    print(json.dumps(of[sys.argv[1]](float(sys.argv[2]))))

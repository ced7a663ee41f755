"""The arena's cores on functions in CUDA's shape that note who calls them, run in a process.

    python arena_on_fakes.py

Prints one JSON object of facts for test_segments.py.
"""

import ctypes
import json
from typing import Any

from gpu_alloc import AllocatorConfig
from gpu_alloc.native import Arena
from gpu_alloc.sources import HostSource

MIB = 1 << 20
GLOBAL, RELAXED = 0, 2  # how strictly this thread's calls end others' captures
OUT, INTS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)


class Fakes:
    """A runtime of several devices that are host memory."""

    def __init__(self) -> None:
        self.device, self.mode = 0, GLOBAL
        self.calls: list[tuple[str, int, int]] = []
        self.fail: set[str] = set()
        self._memory = HostSource()
        self._sizes: dict[int, int] = {}
        shapes: dict[str, tuple[Any, ...]] = {
            "malloc": (OUT, ctypes.c_size_t),
            "free": (ctypes.c_void_p,),
            "create": (OUT, ctypes.c_uint),
            "record": (ctypes.c_void_p, ctypes.c_void_p),
            "query": (ctypes.c_void_p,),
            "wait": (ctypes.c_void_p,),
            "destroy": (ctypes.c_void_p,),
            "is_capturing": (ctypes.c_void_p, INTS),
            "device_wait": (),
            "forget_error": (),
            "get_device": (INTS,),
            "set_device": (ctypes.c_int,),
            "exchange_mode": (INTS,),
        }
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *shape)(getattr(self, name, self._noted(name)))
            for name, shape in shapes.items()
        ]
        self.pointers = [ctypes.cast(f, ctypes.c_void_p).value for f in self._functions]

    def _noted(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, self.device, self.mode))
            return 1 if name in self.fail else 0

        return call

    def malloc(self, out: Any, size: int) -> int:
        out[0] = self._memory.acquire(size)
        self._sizes[out[0]] = size
        return self._noted("malloc")()

    def free(self, ptr: int) -> int:
        self._memory.release(ptr, self._sizes.pop(ptr))
        return self._noted("free")()

    def create(self, out: Any, flags: int) -> int:
        out[0] = 1
        return 0

    def get_device(self, out: Any) -> int:
        out[0] = self.device
        return 0

    def set_device(self, device: int) -> int:
        self.device = device
        return 0

    def exchange_mode(self, mode: Any) -> int:
        mode[0], self.mode = self.mode, mode[0]
        return 0


def main() -> dict[str, Any]:
    fakes = Fakes()
    arena = Arena(AllocatorConfig(), fakes.pointers)
    facts: dict[str, Any] = {"unused": arena.devices()}
    one = arena.allocator(1)
    facts["used"] = arena.devices()
    one.start_recording()
    one.mark("a")
    arena.allocator(1).mark("b")
    ptr, _ = one.malloc(3 * MIB, 5)
    one.record_stream(ptr, 6)
    one.free(ptr)
    one.release_idle()
    facts["marks"] = [event.note for event in one.stop_recording() if event.action == "mark"]
    facts["calls"] = sorted({call for call in fakes.calls if call[0] != "forget_error"})
    facts["after"] = [fakes.device, fakes.mode]

    ptr, _ = one.malloc(3 * MIB, 5)
    one.record_stream(ptr, 6)
    fakes.fail = {"record", "device_wait"}
    one.free(ptr)
    facts["reused_unrecorded"] = one.malloc(3 * MIB, 5).ptr == ptr
    fakes.fail = {"query"}
    one.malloc(MIB, 5)  # records
    fakes.fail = {"query", "wait"}
    facts["reused_unwaited"] = one.malloc(3 * MIB, 5).ptr == ptr
    fakes.fail = set()
    facts["reused"] = one.malloc(3 * MIB, 5).ptr == ptr
    return facts


if __name__ == "__main__":
    print(json.dumps(main()))

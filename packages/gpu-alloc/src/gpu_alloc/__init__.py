"""A two-pool auto-growth best-fit GPU allocator with statistics and replay.

Importing this package imports neither cupy nor torch and touches no device.

>>> import gpu_alloc
>>> gpu_alloc.TwoPoolAllocator(gpu_alloc.AddressSource(1 << 30)).malloc(100).size
512
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")  # the one list of names
_ROOM_OF = {name: room for room, name in re.findall(r"from (\S+) import \(?\s*(\w+)", _STUB)}
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
    return value

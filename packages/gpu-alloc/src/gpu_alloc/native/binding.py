"""The functions of core.cpp as Python calls them, and one core behind them.

Three ways to call: `fast` keeps Python's lock, for functions that never wait; `waiting` lets it go;
`fastest` makes a builtin of one of two functions, without ctypes in its way.

Invariant: a call that finds another version of the library raises instead of guessing.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from gpu_alloc.core import MIB, AllocatorConfig
from gpu_alloc.errors import refuse_reentry
from gpu_alloc.native.build import NativeUnavailableError, library_path
from gpu_alloc.plan import LifetimePlan, PlanUse
from gpu_alloc.sources import PagedSource

_CORE_VERSION = 6
CLOSED, REENTRANT, NO_MEMORY = -1, -2, -3
NUM_STATS = 33
NUM_FUNCTIONS = 15  # those of the struct `Functions` in core.cpp

_NUMBER, _POINTER, _NUMBERS = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ga_open": (_POINTER, _NUMBERS, _POINTER),
    "ga_pre_allocate": (_NUMBER, _POINTER),
    "ga_try_malloc": (_NUMBER, _POINTER, _NUMBER, _NUMBER),
    "ga_malloc": (_NUMBER, _POINTER, _NUMBER, _NUMBER, ctypes.c_int),
    "ga_free": (_NUMBER, _POINTER, _NUMBER),
    "ga_record_stream": (_NUMBER, _POINTER, _NUMBER, _NUMBER),
    "ga_release_idle": (_NUMBER, _POINTER, ctypes.c_int, ctypes.c_int, _NUMBER),
    "ga_follow": (_NUMBER, _POINTER, _NUMBERS, _NUMBER, _NUMBER),
    "ga_begin_step": (_NUMBER, _POINTER),
    "ga_plan_use": (_NUMBER, _POINTER, _NUMBERS),
    "ga_close": (_NUMBER, _POINTER),
    "ga_limit": (_NUMBER, _POINTER),
    "ga_set_limit": (None, _POINTER, _NUMBER),
    "ga_reset_peaks": (_NUMBER, _POINTER),
    "ga_stats": (_NUMBER, _POINTER, _NUMBER, _NUMBERS),
    "ga_snapshot": (_NUMBER, _POINTER, _NUMBERS, _NUMBER),
    "ga_start_recording": (_NUMBER, _POINTER),
    "ga_mark": (_NUMBER, _POINTER, _NUMBER),
    "ga_stop_recording": (_NUMBER, _POINTER, _NUMBERS, _NUMBER),
    "ga_run": (_NUMBER, _POINTER, _NUMBERS, _NUMBER, _NUMBERS),
    "ga_last_failure": (_NUMBER, _POINTER, _NUMBERS, _NUMBER),
    "ga_driver": (None, _POINTER),
    "ga_serve": (_NUMBER, _NUMBERS, _POINTER),
    "ga_python": (None, _POINTER),
    "ga_core_of": (_POINTER, ctypes.c_int),
    "ga_core_if_any": (_POINTER, ctypes.c_int),
}


# PyCFunction_NewEx, of Python's stable interface: what is called, `self`, the module's name.
_NEW_BUILTIN = ctypes.PYFUNCTYPE(ctypes.py_object, _POINTER, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
# PyCapsule_New: a pointer, no name, what is called when nobody holds the capsule any more.
_NEW_CAPSULE = ctypes.PYFUNCTYPE(ctypes.py_object, _POINTER, ctypes.c_char_p, _POINTER)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_PYTHONS = (
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyCapsule_GetPointer",
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The loaded library at `path`: `waiting` lets Python's lock go while it runs, `fast` not."""

    path: Path
    waiting: ctypes.CDLL
    fast: ctypes.PyDLL

    def fastest(self, name: str, handle: int) -> Callable[..., int]:
        """A function of a core as a builtin of Python's, which keeps Python's lock."""
        definition = ctypes.addressof(ctypes.c_char.in_dll(self.waiting, f"ga_py_{name}"))
        builtin: Callable[..., int] = _NEW_BUILTIN(definition, handle, None)
        return builtin

    def address_of(self, name: str) -> int:
        """Where a function is, for callers that are not Python."""
        return ctypes.cast(getattr(self.waiting, name), ctypes.c_void_p).value or 0


@cache
def native_library() -> Library:
    """The library, loaded at the first call. Raises NativeUnavailableError when there is none."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path} cannot be loaded: {error}") from None
    for library in loaded:
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.ga_version.restype = _NUMBER
    if loaded[0].ga_version() != _CORE_VERSION:
        raise NativeUnavailableError(f"{path} is of another version; delete it")
    addresses = [ctypes.cast(getattr(ctypes.pythonapi, n), _POINTER).value for n in _PYTHONS]
    loaded[0].ga_python((_POINTER * len(addresses))(*addresses))
    return Library(path=path, waiting=loaded[0], fast=loaded[1])


@cache
def is_compiled() -> bool:
    """Whether there is a compiled core, or one can be made; the Python core decides alike."""
    try:
        native_library()
    except NativeUnavailableError:
        return False
    return True


def settings_of(
    config: AllocatorConfig,
    *,
    granularity_bytes: int,
    capacity_bytes: int | None = None,
) -> "ctypes.Array[ctypes.c_int64]":
    """The settings in the order of core.cpp; a capacity is for invented addresses only."""
    two_pools = config.small_pool_size_in_mb > 0
    values = (
        config.alignment_size,
        config.small_pool_size_in_mb * MIB,
        config.small_pool_auto_growth_chunk_size_in_mb * MIB,
        config.large_chunk_bytes(),
        config.small_pool_pre_alloc_in_mb * MIB if two_pools else 0,
        config.large_pool_pre_alloc_in_mb * MIB,
        config.free_idle_chunk,
        config.free_when_no_cache_hit,
        config.memory_limit_in_mb * MIB,
        granularity_bytes,
        -1 if capacity_bytes is None else min(capacity_bytes, 1 << 62),
        PagedSource.range_bytes if config.use_virtual_memory else 0,
    )
    return (ctypes.c_int64 * len(values))(*values)


def functions_of(pointers: Sequence[int | None]) -> "ctypes.Array[ctypes.c_void_p]":
    """The functions that a core calls, in the order of core.cpp; None: it has none."""
    return (ctypes.c_void_p * NUM_FUNCTIONS)(*pointers, *(NUM_FUNCTIONS - len(pointers)) * (None,))


@final
class Core:
    """One core by its handle. What it returns are plain numbers; `NativeAllocator` gives them
    meaning.

    is_owned: the core ends with this object; its memory is not given back. What is garbage together
    loses what it holds only after all its finalizers have run, and those may free blocks.
    """

    def __init__(self, library: Library, handle: int, *, is_owned: bool = False) -> None:
        self.library = library
        self.handle = handle
        if is_owned:
            self._owner: object = _NEW_CAPSULE(handle, None, library.address_of("ga_py_end"))

    def call(self, name: str, *arguments: int) -> int:
        """Call a function of the core that may wait. Raises ReentrantMallocError inside one of its
        own callbacks.
        """
        result: int = getattr(self.library.waiting, name)(self.handle, *arguments)
        if result == REENTRANT:
            refuse_reentry()
        return result

    def stats(self, stream: int) -> list[int]:
        """The counters, and what `stream` may use."""
        out = (ctypes.c_int64 * NUM_STATS)()
        self.call("ga_stats", stream, out)  # type: ignore[arg-type]  # an array is a pointer
        return list(out)

    def follow(self, plan: LifetimePlan | None) -> int:
        """Follow a plan, or none. 0, or how many blocks of the plan before are in use, or
        NO_MEMORY.
        """
        numbers: list[int] = []
        if plan is not None:
            for stream, start in plan.streams():
                numbers += 0, stream, start
            for place in plan.places:
                numbers += place
        rows = (ctypes.c_int64 * len(numbers))(*numbers)
        size_bytes = 0 if plan is None else plan.size_bytes
        return self.call("ga_follow", rows, len(numbers), size_bytes)  # type: ignore[arg-type]

    def plan_use(self) -> PlanUse:
        """See `TwoPoolAllocator.plan_use`."""
        out = (ctypes.c_int64 * 3)()
        self.call("ga_plan_use", out)  # type: ignore[arg-type]
        return PlanUse(bool(out[0]), out[1], out[2])

    def rows(self, name: str) -> list[int]:
        """What a function writes that says how much room it needs."""
        room = 0
        write: Callable[..., int] = self.call
        while True:
            out = (ctypes.c_int64 * room)()
            needed = write(name, out, room)
            if needed <= room:
                return out[:needed]
            room = needed

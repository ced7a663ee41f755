"""The memory of this process, as Linux counts it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 128 << 10  # of mallopt(3), and where glibc begins


def resident_bytes() -> int:
    """What is resident now."""
    return _field_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since the start, or since `forget_peak`."""
    return _field_bytes("VmHWM")


def forget_peak() -> None:
    """Give free memory back, and let the peak begin again with what is then resident.

    Memory that an earlier test has freed stays resident, and growth into it would not be seen.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def keep_no_freed_memory() -> None:
    """Let this process give each tensor's memory back when it is freed, from now on.

    glibc asks for large memory apart at first, but after such a block is freed it keeps blocks of
    that size for the next: whether one is resident at a peak is then a matter of timing.
    """
    if not ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES):
        raise OSError(f"mallopt did not take M_MMAP_THRESHOLD={_THRESHOLD_BYTES}")


def growth_bytes(call: Callable[[], object]) -> int:
    """The most that this process grew by during a call; from then on it keeps no freed memory."""
    keep_no_freed_memory()
    forget_peak()
    before = resident_bytes()
    call()
    return peak_resident_bytes() - before


def _field_bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

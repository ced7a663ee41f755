"""The memory of this process, as Linux counts it."""

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """What is resident now."""
    return _field_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since the start, or since `forget_peak`."""
    return _field_bytes("VmHWM")


def forget_peak() -> None:
    """Let the peak begin again with what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _field_bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))

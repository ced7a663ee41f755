"""How long a message must be for its sender to wait for the receiver, on the machine of the test.

    LARGE = more_than_sockets_hold() // 4                   # float32

A sender is done once the kernel has all bytes, read or not, and the kernel lets the buffers of a
connection grow as it likes: the receiver's up to the last number of `tcp_rmem`, the sender's up to
that of `tcp_wmem`; 6 and 4 MiB by default, 32 and 4 on some machines. Shared memory holds less.
"""

from pathlib import Path

_FOLDER = Path("/proc/sys/net/ipv4")
_UNKNOWN_BYTES = 32 << 20  # of a buffer whose limit the system does not say
_SLACK = 1.25  # of the sum: a buffer may go beyond its limit by what comes at once
_LEAST_BYTES = 16 << 20


def more_than_sockets_hold() -> int:
    """Bytes, a multiple of 64, that no connection of this machine takes before any is read."""
    limits_bytes = sum(_limit_bytes(name) for name in ("tcp_rmem", "tcp_wmem"))
    return max(_LEAST_BYTES, int(_SLACK * limits_bytes)) // 64 * 64


def _limit_bytes(name: str) -> int:
    try:
        return int((_FOLDER / name).read_text(encoding="ascii").split()[-1])
    except OSError:
        return _UNKNOWN_BYTES

"""Memory that two processes share, with every page touched before it is needed.

The memory has no name (`memfd`): it is handed to the other process as a file descriptor and goes
away with the last process that maps it, so a kill leaves nothing behind. Allocation happens here
and at once; a first copy into it costs what every later copy costs.

    memory = SharedMemory.allocate(1 << 20, purpose="staging")
    memory.tensor[:5] = 1  # uint8; SharedMemory.attach(memory.fd) elsewhere sees the same bytes
"""

import math
import mmap
import os
from pathlib import Path

import torch

from unified_ckpt.devices import pin, unpin
from unified_ckpt.errors import SaveError
from unified_ckpt.geometry import round_up

_RESERVE_BYTES = 64 * 1024 * 1024  # left to everything else on the machine


class SharedMemory:
    """A mapping of shared memory; `tensor` is all of it as uint8, and keeps it mapped."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._pinned = False
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def allocate(cls, num_bytes: int, *, purpose: str) -> "SharedMemory":
        """Make zeroed memory of at least that size."""
        num_bytes = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        check_memory(num_bytes, purpose=purpose)
        fd = os.memfd_create(f"unified-ckpt-{purpose.replace(' ', '-')}")
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # an error here, not a SIGBUS at the first touch
            return cls(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise SaveError(f"{purpose} needs {num_bytes} bytes of memory: {error}") from error

    @classmethod
    def attach(cls, fd: int) -> "SharedMemory":
        """Map memory that another process allocated; takes over the descriptor."""
        try:
            return cls(fd, os.fstat(fd).st_size)
        except (OSError, ValueError):
            os.close(fd)
            raise

    def pin(self) -> None:
        """Lock the pages and let CUDA know, once, if it can; `close` undoes it."""
        if not self._pinned:
            self._pinned = pin(self.tensor)

    def close(self) -> None:
        """Close the descriptor; the bytes go when no tensor views them in any process."""
        if self._pinned:
            unpin(self.tensor)
            self._pinned = False
        os.close(self.fd)


def check_memory(num_bytes: int, *, purpose: str) -> None:
    """Refuse to allocate what the machine, or this process's cgroup, has not available."""
    available = available_bytes()
    if num_bytes + _RESERVE_BYTES > available:
        raise SaveError(
            f"{purpose} needs {num_bytes} bytes of memory, but only {available} are available, of "
            f"which {_RESERVE_BYTES} are left to others; save synchronously, shard further, or use "
            "a machine with more memory"
        )


def available_bytes() -> int:
    """Memory that can still be allocated here: the machine's, or the cgroup's if that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return int(min(available, cgroup_available_bytes(Path("/sys/fs/cgroup"))))


def cgroup_available_bytes(root: Path) -> float:
    """Memory that the cgroup of a mounted hierarchy, version 2 or 1, still allows; inf for any.

    Pages of files that nobody used lately count as used there, but the kernel drops them when
    memory is asked for. Without them is what Kubernetes calls the working set.
    """
    available = math.inf
    for limit_name, used_name, stat_name, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        try:
            limit = (root / limit_name).read_text().strip()
            used = int((root / used_name).read_text())
            stat = dict(line.split() for line in (root / stat_name).read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            available = min(available, int(limit) - used + int(stat.get(cache_key, 0)))
    return available

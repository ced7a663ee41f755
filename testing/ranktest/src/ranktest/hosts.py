"""Make a rank of this machine one of another host, as far as shared memory goes.

    def fn(rank: int, world_size: int) -> None:
        leave_shared_memory()          # before the group's first call
        ...

The process gets a /dev/shm of its own (a mount namespace), which is what a container is to its
neighbour: sockets still reach it, files in /dev/shm do not.
"""

import ctypes
import os
import threading

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_FOLDER = b"/dev/shm"


def leave_shared_memory() -> None:
    """Share no memory with other processes from now on; for a process that ends with its test.

    Works as root, and for others where users may make namespaces and the process has one thread.

    Raises:
        OSError: the system does not allow it; `can_leave_shared_memory` tells beforehand.
    """
    users = _CLONE_NEWUSER if os.geteuid() else 0
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | users), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    _check(libc.mount(b"tmpfs", _FOLDER, b"tmpfs", 0, None), "mount -t tmpfs /dev/shm")


def can_leave_shared_memory() -> bool:
    """Whether `leave_shared_memory` works here, tried in a process of its own."""
    if threading.active_count() > 1 and os.geteuid():
        return False
    child = os.fork()
    if child == 0:
        code = 1
        try:
            leave_shared_memory()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")

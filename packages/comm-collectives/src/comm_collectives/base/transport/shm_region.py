"""Memory that the ranks of one host share: opened by proof, gone with its last user.

A region exists only if every rank really sees the others' writes: rank 0 creates a file of random
name in /dev/shm, the others open it, each writes a random number there and reads everybody's. Names
of hosts are never asked, since containers make them lie.

Invariants: the name is removed before the space is reserved, so that a killed job leaves no memory
behind; the space is reserved before anyone touches it, so that a full /dev/shm is a None and not a
later SIGBUS. Each rank holds a lock on its own byte of the file, which ends with its process.
Plain stores are seen in order by the other ranks (x86_64 only), so data is stored first and then
the number that announces it; a store that must be seen before something is read needs `fence`.
A process forked later may close its copy of the region, but must not wait or write.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from secrets import token_bytes
from typing import final

from comm_collectives.errors import CommError
from comm_collectives.units import POLL_S, round_up

if sys.platform != "win32":
    import fcntl

_FOLDER = "/dev/shm"
_MARK = struct.Struct("<?16s")  # able, and the name of the file or a nonce
_NONCE_BYTES = 16
_FLAG_BYTES = 8
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux on x86_64: type, whence, start, len, pid

_FUTEX = 202  # the system call's number on x86_64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_SHORTEST_SPIN_S = 5e-6
_LONGEST_SPIN_S = 1e-4  # before a sleep, if every rank has a core; a wake from sleep costs as much
_LONGEST_CROWDED_SPIN_S = 2e-5  # else; its yields let the ranks run that share this core


@final
class Region:
    """`num_bytes` of memory, zero at first, that all ranks of a group read and write.

    Aligned words of `memory` are read and written whole; it stays valid after `close` for those who
    still hold it. One thread of a rank waits at a time.
    """

    def __init__(self, candidate: "_Candidate") -> None:
        mapping, num_bytes = candidate.mapping, candidate.num_bytes
        start = _head_bytes(candidate.size)
        self.rank: int = candidate.rank
        self.size: int = candidate.size
        self.memory: memoryview = memoryview(mapping)[start : start + num_bytes]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._words = self.memory[: num_bytes // 4 * 4].cast("i")
        flags_at = _NONCE_BYTES * self.size
        self._asleep = memoryview(mapping)[flags_at : flags_at + _FLAG_BYTES * self.size].cast("q")
        self._fd = candidate.fd
        self._close = weakref.finalize(self, os.close, candidate.fd)
        self._fence = threading.Lock()
        self._kernel = _Kernel()
        crowded = self.size > len(os.sched_getaffinity(0))
        self._longest_spin_s = _LONGEST_CROWDED_SPIN_S if crowded else _LONGEST_SPIN_S
        self._spin_s = self._longest_spin_s

    @staticmethod
    def open(
        rank: int,
        size: int,
        num_bytes: int,
        all_gather: Callable[[bytes], list[bytes]],
        *,
        spare_bytes: int = 0,
    ) -> "Region | None":
        """Open one region for the `size` ranks of a group. Collective: every rank calls this.

        `all_gather` hands a message of at most 256 bytes to all ranks and returns everybody's, by
        rank; it may pad them. It is called at most three times, on every rank alike. Afterwards
        `spare_bytes` of /dev/shm have to be free still.

        Returns:
            The region; or None, on every rank, if any rank does not share memory with the others
            (another host or container, no or full /dev/shm, ranks that are threads of one process)
            or the machine is not Linux on x86_64.

        Raises:
            CommError: whatever `all_gather` raises; nothing is left behind.
        """
        candidate = _Candidate(rank, size, num_bytes, spare_bytes)
        try:
            if all(
                step(all_gather) for step in (candidate.offer, candidate.attach, candidate.confirm)
            ):
                return candidate.take()
            return None
        finally:
            candidate.discard()

    def dead(self) -> tuple[int, ...]:
        """Other ranks whose process is gone or has closed the region; any rank, at any time.

        Raises:
            CommError: this rank has closed the region.
        """
        if not self._close.alive:
            raise CommError("the shared region is closed; open another")
        return _unlocked(self._fd, self.rank, self.size)

    def fence(self) -> None:
        """Let all ranks see what was stored so far before anything else is read."""
        # Whatever it is made of, a lock is taken by a locked instruction: a full barrier on x86_64.
        with self._fence:
            pass

    def wait_until(self, index: int, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `ready()`, which reads the memory; False if it still is not after the limit.

        Who makes it true then changes word `index` to a value that it has not had lately and calls
        `wake(index)`. Should nobody wake, `ready` is asked every 0.05 s. Other threads run
        meanwhile. The core is held for 0.1 ms at most, 0.02 if there are fewer cores than ranks.
        """
        if ready():
            return True
        deadline = time.monotonic() + timeout_s
        if self._spin(ready, deadline):
            return True
        asleep, rank = self._asleep, self.rank
        try:
            while True:
                # Flag, fence, look: against change, fence, look for flags in `wake`. At least one
                # of the two sees the other, and the kernel compares the word once more.
                asleep[rank] = index + 1
                self.fence()
                seen = self._words[index]
                if ready():
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                # In slices, so that nothing depends on a wake alone.
                self._kernel.sleep(self._address + 4 * index, seen, min(left_s, POLL_S))
        finally:
            asleep[rank] = 0

    def wake(self, index: int) -> None:
        """Wake the ranks that wait on word `index`, after changing it; a system call if any do."""
        self.fence()
        if index + 1 in self._asleep.tolist():
            self._kernel.wake(self._address + 4 * index)

    def close(self) -> None:
        """Leave the region: the others see this rank as dead. Not collective; twice is harmless."""
        self._close()
        self.memory = self._words = self._asleep = memoryview(b"")

    def _spin(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Look for a moment, longer if that paid off lately, and yield the core in between."""
        end = min(deadline, time.monotonic() + self._spin_s)
        while time.monotonic() < end:
            self._kernel.give_way()
            if ready():
                self._spin_s = min(2 * self._spin_s, self._longest_spin_s)
                return True
        self._spin_s = max(self._spin_s / 2, _SHORTEST_SPIN_S)
        return False


@final
class _Kernel:
    """Sleep and wake on words of shared memory, without the GIL."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.give_way: Callable[[], int] = library.sched_yield
        self._syscall = library.syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [
            ctypes.c_long,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
        ]

    def sleep(self, address: int, seen: int, timeout_s: float) -> None:
        """Return when woken, after `timeout_s`, at a signal, or if the word is not `seen`."""
        limit = struct.pack("qq", int(timeout_s), int(timeout_s % 1 * 1e9))
        self._syscall(_FUTEX, address, _FUTEX_WAIT, seen, limit)

    def wake(self, address: int) -> None:
        self._syscall(_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None)


@final
class _Candidate:
    """A region in the making. Each step ends in an exchange, after which all ranks decide alike."""

    mapping: mmap.mmap  # from `attach` on

    def __init__(self, rank: int, size: int, num_bytes: int, spare_bytes: int) -> None:
        self.rank, self.size, self.num_bytes = rank, size, num_bytes
        self._spare_bytes = spare_bytes
        self.fd = -1
        self._nonce = token_bytes(_NONCE_BYTES)
        self._path = ""

    def offer(self, all_gather: Callable[[bytes], list[bytes]]) -> bool:
        """Rank 0 creates the file and tells its name."""
        name = token_bytes(16)
        able = _machine_fits()
        if able and self.rank == 0:
            self._name(name)
            able = _succeeds(self._create)
        offers = [_MARK.unpack_from(text) for text in all_gather(_MARK.pack(able, name))]
        self._name(offers[0][1])
        return all(offer[0] for offer in offers)

    def attach(self, all_gather: Callable[[bytes], list[bytes]]) -> bool:
        """Everybody maps the file, locks its byte and leaves its nonce."""
        able = _succeeds(self._map)
        marks = [_MARK.unpack_from(text) for text in all_gather(_MARK.pack(able, self._nonce))]
        self._nonce = b"".join(mark[1] for mark in marks)
        return all(mark[0] for mark in marks)

    def confirm(self, all_gather: Callable[[bytes], list[bytes]]) -> bool:
        """The name goes, the space is reserved, and everybody checks everybody's nonce and lock."""
        self._unlink()
        able = _succeeds(self._check)
        return all(message[0] for message in all_gather(bytes([able])))

    def take(self) -> Region:
        region = Region(self)
        self.fd = -1
        return region

    def discard(self) -> None:
        """Leave nothing behind; any rank removes the name, should rank 0 be dead."""
        self._unlink()
        if self.fd >= 0:
            os.close(self.fd)

    def _name(self, name: bytes) -> None:
        self._path = f"{_FOLDER}/comm-collectives-{name.hex()}"

    def _create(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self._path, flags, 0o600)
        os.ftruncate(self.fd, self._total_bytes)
        os.posix_fallocate(self.fd, 0, _head_bytes(self.size))

    def _map(self) -> None:
        if self.fd < 0:
            self.fd = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        # The lock ends as soon as any descriptor of this file is closed: mmap keeps a duplicate,
        # which is closed with the mapping and therefore never before the region is.
        self.mapping = mmap.mmap(self.fd, self._total_bytes)
        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        os.pwrite(self.fd, self._nonce, _NONCE_BYTES * self.rank)

    def _check(self) -> None:
        if self.rank == 0:
            os.posix_fallocate(self.fd, 0, self._total_bytes)
            room = os.fstatvfs(self.fd)
            if room.f_bavail * room.f_frsize < self._spare_bytes:
                raise OSError("too little would be left for others")
        if self.mapping[: len(self._nonce)] != self._nonce:
            raise OSError("the ranks do not see each other's writes")
        if _unlocked(self.fd, self.rank, self.size):
            raise OSError("the ranks do not see each other's locks")

    def _unlink(self) -> None:
        if self._path:
            _succeeds(lambda: os.unlink(self._path))

    @property
    def _total_bytes(self) -> int:
        return _head_bytes(self.size) + self.num_bytes


def _machine_fits() -> bool:
    """Whether stores keep their order, and futexes and locks have the form that is used here."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return False
    return os.uname().machine == "x86_64"


def _head_bytes(size: int) -> int:
    """Bytes before the users' memory: a nonce and a flag for each rank, in whole pages."""
    return round_up((_NONCE_BYTES + _FLAG_BYTES) * size, mmap.PAGESIZE)


def _unlocked(fd: int, rank: int, size: int) -> tuple[int, ...]:
    """Other ranks that do not hold the lock on their byte. A process never sees its own locks."""
    gone = []
    for peer in range(size):
        if peer != rank:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, peer, 1, 0)
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
            if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
                gone.append(peer)
    return tuple(gone)


def _succeeds(step: Callable[[], object]) -> bool:
    """Run one step; False if the system refuses it."""
    try:
        step()
    except (OSError, ValueError):  # ValueError: mmap finds a file that is too short
        return False
    return True

"""One job at a time manages a folder of checkpoints; a second one is refused by name.

In a directory the system's lock says so, and takes it from a process that dies. In a store, and on
network file systems without locks, a lease does: the note of the folder (`folders.in_store`) names
its holder, who renews it. Nobody compares clocks of machines: who wants the folder watches the
note, and if that does not change for `lease_s` seconds of its own clock, its holder is gone. A note
is only swapped, so a holder that was stopped for so long finds out before its next save or removal,
and raises. A holder of the same machine that is dead is not waited for.

    hold = hold_folder(Location(store=store, key="run"), lease_s=30.0)
    hold.note("checkpoint-10")  # before it is saved
    hold.close()
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from unified_ckpt.errors import CheckpointError, SaveError
from unified_ckpt.files import lock_folder, unlock_folder
from unified_ckpt.files.storage import Fetched, LocalStore, Location
from unified_ckpt.folders.in_store import Holder, RunNote, note_place, read_note

_LOCK_WAIT_S = 10.0  # children of a job that was killed hold its lock until they notice
_RENEWALS = 3  # in the time of a lease
_LOOKS = 20
_ATTEMPTS = 5


class FolderHold(Protocol):
    """What a process holds that manages a folder."""

    def note(self, name: str) -> None:
        """Say that a checkpoint is about to be saved; raise if another job holds the folder."""

    def forget(self, names: Collection[str]) -> None:
        """Say that some checkpoints are gone."""

    def close(self) -> None:
        """Let another job have the folder."""


def hold_folder(folder: Path | Location, *, lease_s: float) -> FolderHold:
    """Hold a folder for this process.

    Raises:
        BlockingIOError: another job holds it.
        OSError: the store does not answer, or the folder cannot be opened.
    """
    if isinstance(folder, Location):
        return Lease(folder, lease_s=lease_s)
    try:
        fd, locked = lock_folder(folder, wait_s=_LOCK_WAIT_S)
    except BlockingIOError as error:
        raise BlockingIOError(
            f"another process manages {folder} and has held its lock for {_LOCK_WAIT_S:g} s; end "
            "it, or use another folder"
        ) from error
    if locked:
        return _Lock(fd)
    unlock_folder(fd)
    return Lease(Location(store=LocalStore(folder), key=""), lease_s=lease_s)


class _Lock:
    """A folder held by the system's lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def note(self, name: str) -> None:
        """Do nothing: directories are listed as they are, and a lock is not lost."""

    def forget(self, names: Collection[str]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Release the lock."""
        unlock_folder(self._fd)


class Lease:
    """A folder of a store held by its note, which a thread renews; see the module.

    Raises:
        BlockingIOError: the folder is held by a job that is alive.
        OSError: the store does not answer.
    """

    def __init__(self, folder: Location, *, lease_s: float) -> None:
        self._folder = folder
        self._place = note_place(folder)
        self._lease_s = lease_s
        self._mine = this_process()
        self._guard = threading.Lock()
        self._lost = ""
        self._note, self._version = self._take()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="unified-ckpt-lease", daemon=True)
        self._thread.start()

    def note(self, name: str) -> None:
        """Add a name to the note.

        Raises:
            SaveError: another job holds the folder by now.
            OSError: the store does not answer.
        """
        with self._guard:
            self._write((*(each for each in self._note.names if each != name), name))

    def forget(self, names: Collection[str]) -> None:
        """Take names out of the note; raises as `note`."""
        with self._guard:
            left = tuple(name for name in self._note.names if name not in names)
            if left != self._note.names:
                self._write(left)

    def close(self) -> None:
        """End the renewals, and give the folder free; where the store does not answer, later."""
        self._end.set()
        self._thread.join()
        with self._guard, suppress(OSError, CheckpointError):
            self._write(self._note.names, release=True)

    def _take(self) -> tuple[RunNote, str | None]:
        """Write the note of this process as soon as the folder is free."""
        seen, since_s = read_note(self._folder), time.monotonic()
        failed = 0
        while True:
            if self._is_free(seen, since_s):
                old = None if seen is None else seen[1].version
                wanted = RunNote(
                    holder=self._mine,
                    number=1 if seen is None else seen[0].number + 1,
                    names=() if seen is None else seen[0].names,
                )
                try:
                    self._place.store.swap(self._place.key, wanted.to_bytes(), old=old)
                except (ConnectionError, TimeoutError):  # it may be written all the same
                    failed += 1
                    if failed == _ATTEMPTS:
                        raise
            now = read_note(self._folder)
            if now is not None and now[0].holder == self._mine:
                return now[0], now[1].version
            if _version_of(now) != _version_of(seen):
                self._refuse_alive(seen, now)
                seen, since_s = now, time.monotonic()
            time.sleep(self._lease_s / _LOOKS)

    def _is_free(self, seen: tuple[RunNote, Fetched] | None, since_s: float) -> bool:
        holder = None if seen is None else seen[0].holder
        late = time.monotonic() - since_s >= self._lease_s
        return holder is None or late or _is_dead(holder)

    def _refuse_alive(
        self, before: tuple[RunNote, Fetched] | None, now: tuple[RunNote, Fetched] | None
    ) -> None:
        holder = None if now is None else now[0].holder
        if holder is None or before is None or holder != before[0].holder:
            return
        if not _is_dead(holder):  # else it was its last request, which came late
            raise BlockingIOError(
                f"another job manages {self._folder}: {holder}, which has just said that it is "
                "alive; end it, or use another folder"
            )

    def _renew(self) -> None:
        while not self._end.wait(self._lease_s / _RENEWALS):
            with self._guard, suppress(OSError, CheckpointError):  # `note` tells, or tries again
                self._write(self._note.names)

    def _write(self, names: tuple[str, ...], *, release: bool = False) -> None:
        """Swap the note; a swap whose answer was lost is looked for, and repeated if needed."""
        if self._lost:
            raise SaveError(self._lost)
        holder = None if release else self._mine
        for _ in range(_ATTEMPTS):
            wanted = replace(self._note, holder=holder, number=self._note.number + 1, names=names)
            raw = wanted.to_bytes()
            with suppress(ConnectionError, TimeoutError):
                self._place.store.swap(self._place.key, raw, old=self._version)
            now = read_note(self._folder)
            if now is not None and now[1].data == raw:
                self._note, self._version = now[0], now[1].version
                return
            if now is None or now[0].holder != self._mine:
                by = "nobody" if now is None or now[0].holder is None else now[0].holder
                self._lost = (
                    f"this job has lost {self._folder} to another: {by} manages it now, since this "
                    f"one had not renewed its lease for {self._lease_s:g} s; end one of them"
                )
                raise SaveError(self._lost)
            self._note, self._version = now[0], now[1].version
        raise ConnectionError(f"{self._place}: not written in {_ATTEMPTS} attempts")


def this_process() -> Holder:
    """Say which process this is, with a new token."""
    return Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_started(os.getpid()),
    )


def _is_dead(holder: Holder) -> bool:
    """Whether the holder is a process of this machine that has ended; False if that is unknown."""
    if not holder.machine or holder.machine != _machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(holder.pid) not in ("", holder.started)


def _machine() -> str:
    """What processes share that see each other's numbers: one start of one system."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, which tells it from a later one of its number; "" if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] == "Z" else fields[19]


def _version_of(seen: tuple[RunNote, Fetched] | None) -> str | None:
    return None if seen is None else seen[1].version

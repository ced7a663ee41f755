"""One job manages a folder: leases in stores, and where a file system has no locks."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from unified_ckpt.errors import SaveError
from unified_ckpt.files.storage import LocalStore, Location
from unified_ckpt.folders.in_store import RunNote, note_place, read_note
from unified_ckpt.run import CheckpointManager, ManagerOptions
from unified_ckpt.run.hold import Lease, hold_folder, this_process

LEASE_S = 0.6


def folder_in(path: Path) -> Location:
    return Location(store=LocalStore(path), key="run")


def put_note(folder: Location, note: RunNote) -> None:
    found = read_note(folder)
    place = note_place(folder)
    old = None if found is None else found[1].version
    assert place.store.swap(place.key, note.to_bytes(), old=old)


@contextmanager
def stopped_holder(folder: Location) -> Iterator[int]:
    """A process that holds the folder and is stopped."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        Lease(folder, lease_s=LEASE_S)
        os.write(sender, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(receiver, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_second_job_is_refused_as_soon_as_the_first_shows_that_it_lives(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    first = Lease(folder, lease_s=LEASE_S)
    with pytest.raises(BlockingIOError, match=rf"file://.*/run: process {os.getpid()} of \S+, whi"):
        Lease(folder, lease_s=30.0)
    first.close()
    Lease(folder, lease_s=30.0).close()


def test_a_holder_that_was_killed_on_this_machine_is_not_waited_for(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    with stopped_holder(folder):
        pass
    began_s = time.monotonic()
    Lease(folder, lease_s=600.0).close()
    assert time.monotonic() - began_s < 100.0


def test_a_holder_of_another_machine_is_watched_for_the_time_of_a_lease(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    elsewhere = replace(this_process(), machine="another", pid=1)
    put_note(folder, RunNote(holder=elsewhere, number=7, names=("checkpoint-3",)))
    began_s = time.monotonic()
    lease = Lease(folder, lease_s=LEASE_S)
    assert time.monotonic() - began_s >= LEASE_S
    note, _ = read_note(folder)
    assert (note.number, note.names) == (8, ("checkpoint-3",))
    lease.close()


def test_a_job_that_was_stopped_too_long_finds_out_before_it_saves(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    lost = Lease(folder, lease_s=600.0)  # it renews once in 200 seconds
    note, _ = read_note(folder)
    thief = replace(this_process(), host="node-7", pid=77)
    put_note(folder, replace(note, holder=thief, number=note.number + 1))
    for _ in range(2):
        with pytest.raises(SaveError, match=r"has lost .*: process 77 of node-7 manages it now"):
            lost.note("checkpoint-1")
    lost.close()
    assert read_note(folder)[0].holder == thief, "what is lost is not given free"


def test_names_are_noted_in_order_and_forgotten(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    lease = Lease(folder, lease_s=30.0)
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-10"):
        lease.note(name)
    assert read_note(folder)[0].names == ("checkpoint-9", "checkpoint-10")
    lease.forget(["checkpoint-9", "checkpoint-1"])
    lease.close()
    assert read_note(folder)[0] == RunNote(
        holder=None, number=read_note(folder)[0].number, names=("checkpoint-10",)
    )


def test_a_swap_whose_answer_is_lost_is_found_out(tmp_path: Path) -> None:
    class Loses(LocalStore):
        def swap(self, key: str, data: bytes, *, old: str | None) -> bool:
            super().swap(key, data, old=old)
            raise ConnectionError("lost")

    lease = Lease(Location(store=Loses(tmp_path), key="run"), lease_s=30.0)
    lease.note("checkpoint-1")
    lease.note("checkpoint-2")
    assert read_note(folder_in(tmp_path))[0].names == ("checkpoint-1", "checkpoint-2")
    lease.close()
    assert read_note(folder_in(tmp_path))[0].holder is None


def test_a_directory_without_locks_is_held_by_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS or Lustre that are mounted without locks."""

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    options = ManagerOptions(signals=(), lease_s=LEASE_S)
    refused = pytest.raises(SaveError, match=rf"another job manages .*process {os.getpid()} of")
    with CheckpointManager(tmp_path, options), refused:
        CheckpointManager(tmp_path, options)
    CheckpointManager(tmp_path, options).close()
    hold = hold_folder(tmp_path, lease_s=LEASE_S)
    assert isinstance(hold, Lease)
    hold.close()

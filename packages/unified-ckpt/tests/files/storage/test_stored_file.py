"""Positioned reads of objects: every byte in its place, in few requests, two at a time."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from unified_ckpt.files.storage import READ_BYTES, LocalStore, Location, StoredFile


@dataclass
class _Counting(LocalStore):
    """A folder that counts requests, and how many run at once."""

    root: Path
    sizes: list[int] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, key: str, start: int, num_bytes: int) -> memoryview:
        with self.lock:
            self.sizes.append(num_bytes)
            self.running += 1
            self.most = max(self.most, self.running)
        found = super().read(key, start, num_bytes)
        with self.lock:
            self.running -= 1
        return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def stored(folder: Path, whole: bytes, pool: ThreadPoolExecutor) -> tuple[StoredFile, _Counting]:
    store = _Counting(folder)
    store.upload("file", [whole], num_bytes=len(whole))
    place = Location(store=store, key="file")
    return StoredFile(location=place, pool=pool), store


def test_buffers_are_filled_in_parts_of_which_two_are_under_way(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    whole = os.urandom(3 * READ_BYTES + 1000)
    file, store = stored(tmp_path, whole, pool)
    buffers = [bytearray(n) for n in (5, 0, 2 * READ_BYTES, 700, READ_BYTES)]
    wanted = sum(map(len, buffers))
    assert file.read_at([memoryview(b) for b in buffers], 100) == wanted
    assert b"".join(buffers) == whole[100 : 100 + wanted]
    assert max(store.sizes) <= READ_BYTES and store.most <= 2


def test_a_read_over_the_end_says_how_much_there_was(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    file, _ = stored(tmp_path, bytes(100), pool)
    assert file.read_at([memoryview(bytearray(60)), memoryview(bytearray(60))], 0) == 100
    assert file.num_bytes() == 100


def test_runs_that_lie_close_together_come_in_one_request(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    whole = os.urandom(4 * READ_BYTES)
    file, store = stored(tmp_path, whole, pool)
    starts = [1000 * i for i in range(200)] + [2 * READ_BYTES + 1000 * i for i in range(200)]
    buffer = bytearray(16 * len(starts))
    assert file.read_runs(memoryview(buffer), starts, 16) == len(buffer)
    assert buffer == b"".join(whole[s : s + 16] for s in starts)
    assert len(store.sizes) == 2


def test_runs_longer_than_a_part_are_read_in_parts(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    run = READ_BYTES + 10
    whole = os.urandom(3 * run)
    file, store = stored(tmp_path, whole, pool)
    buffer = bytearray(2 * run)
    assert file.read_runs(memoryview(buffer), [0, 2 * run], run) == 2 * run
    assert buffer == whole[:run] + whole[2 * run :] and max(store.sizes) <= READ_BYTES

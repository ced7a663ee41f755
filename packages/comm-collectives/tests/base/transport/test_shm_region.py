"""Shared memory of real processes: opened by all or by none, and never left behind."""

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm_collectives.base.transport import shm_region
from comm_collectives.base.transport.shm_region import Region
from comm_collectives.errors import CommError
from ranktest import collect_ranks, run_ranks

_LENGTH = 256


def _all_gather(message: bytes) -> list[bytes]:
    sent = torch.frombuffer(bytearray(message.ljust(_LENGTH, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [bytes(text.tolist()) for text in received]


def _open(rank: int, size: int, num_bytes: int = 4096) -> Region:
    region = Region.open(rank, size, num_bytes, _all_gather)
    assert region is not None
    return region


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_sees_what_every_rank_wrote(size: int) -> None:
    def fn(rank: int, world_size: int) -> tuple[bool, list[int], int]:
        region = _open(rank, world_size, 8 * world_size + 3)
        blank = not any(region.memory)
        dist.barrier()
        region.memory[: 8 * world_size].cast("q")[rank] = 1000 + rank
        dist.barrier()
        seen = region.memory[: 8 * world_size].cast("q").tolist()
        return blank, seen, len(region.memory)

    want = (True, [1000 + rank for rank in range(size)], 8 * size + 3)
    assert run_ranks(fn, size) == [want] * size


def test_open_region_has_no_name_in_the_file_system() -> None:
    def fn(rank: int, world_size: int) -> int:
        region = _open(rank, world_size)
        return os.fstat(region._fd).st_nlink

    assert run_ranks(fn, 3) == [0, 0, 0]


def _break_on_rank_1(change: Callable[[], object], num_bytes: int = 4096) -> list[object]:
    """What each rank gets when `change()` was called on rank 1 before."""

    def fn(rank: int, world_size: int) -> bool:
        if rank == 1:
            change()
        return Region.open(rank, world_size, num_bytes, _all_gather) is None

    return run_ranks(fn, 3)


def test_all_ranks_get_none_if_one_has_another_dev_shm(tmp_path: Path) -> None:
    def change() -> None:
        shm_region._FOLDER = str(tmp_path)

    assert _break_on_rank_1(change) == [True] * 3


def test_all_ranks_get_none_if_one_has_another_machine() -> None:
    def change() -> None:
        shm_region._machine_fits = lambda: False

    assert _break_on_rank_1(change) == [True] * 3


def test_all_ranks_get_none_if_one_cannot_map() -> None:
    def change() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + (1 << 32)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    assert _break_on_rank_1(change, 1 << 33) == [True] * 3


def test_all_ranks_get_none_if_the_space_is_not_there() -> None:
    def fn(rank: int, world_size: int) -> bool:
        shm = os.statvfs("/dev/shm")
        # More than the whole of it, which the kernel refuses before it reserves anything.
        num_bytes = shm.f_blocks * shm.f_frsize + 1
        return Region.open(rank, world_size, num_bytes, _all_gather) is None

    assert run_ranks(fn, 2) == [True, True]


def test_file_of_the_same_name_elsewhere_is_not_taken_for_shared(tmp_path: Path) -> None:
    """A copied folder, as another host could have: the name is there, the writes are not."""

    def fn(rank: int, world_size: int) -> tuple[bool, int]:
        copies: list[str] = []

        def copying_gather(message: bytes) -> list[bytes]:
            texts = _all_gather(message)
            path = Path("/dev/shm", f"comm-collectives-{texts[0][1:17].hex()}")
            if rank == 1 and path.exists():
                copies.append(shutil.copy(path, tmp_path))
            dist.barrier()
            return texts

        if rank == 1:
            shm_region._FOLDER = str(tmp_path)
        return Region.open(rank, world_size, 4096, copying_gather) is None, len(copies)

    assert run_ranks(fn, 2) == [(True, 0), (True, 1)]


def test_threads_of_one_process_get_none() -> None:
    """A process never sees its own locks, so such ranks could not tell the dead."""
    barrier = threading.Barrier(2)
    said: dict[int, bytes] = {}
    got: dict[int, Region | None] = {}

    def run(rank: int) -> None:
        def all_gather(message: bytes) -> list[bytes]:
            said[rank] = message
            barrier.wait(10)
            texts = [said[0], said[1]]
            barrier.wait(10)
            return texts

        got[rank] = Region.open(rank, 2, 4096, all_gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {0: None, 1: None}


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_nothing_is_left_when_the_exchange_fails(fails_at: int) -> None:
    names: list[str] = []
    fds = len(os.listdir("/proc/self/fd"))

    def all_gather(message: bytes) -> list[bytes]:
        names.append(f"comm-collectives-{message[1:17].hex()}")
        if len(names) == 1:
            assert names[0] in os.listdir("/dev/shm")
        if len(names) == fails_at:
            raise CommError("the peer is gone")
        return [message]

    with pytest.raises(CommError, match="the peer is gone"):
        Region.open(0, 1, 4096, all_gather)
    assert names[0] not in os.listdir("/dev/shm")
    assert len(os.listdir("/proc/self/fd")) == fds


def test_peers_remove_the_name_if_rank_0_is_killed_while_opening() -> None:
    def fn(rank: int, world_size: int) -> bool:
        name = ""

        def all_gather(message: bytes) -> list[bytes]:
            nonlocal name
            texts = _all_gather(message)
            if not name:
                name = f"comm-collectives-{texts[0][1:17].hex()}"
                dist.barrier()
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return texts

        with pytest.raises(RuntimeError):
            Region.open(rank, world_size, 4096, all_gather)
        return name in os.listdir("/dev/shm")

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert [(o.error_type, o.value) for o in outcomes] == [("Died", None), (None, False)]


def test_opening_and_closing_leaks_no_descriptor() -> None:
    def fn(rank: int, world_size: int) -> list[int]:
        counts = []
        for _ in range(20):
            region = _open(rank, world_size)
            region.close()
            region.close()
            del region
            counts.append(len(os.listdir("/proc/self/fd")))
        return counts

    for counts in run_ranks(fn, 2):
        assert len(set(counts)) == 1  # type: ignore[arg-type]


def _wait_for(fact: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_killed_rank_is_dead_and_stopped_rank_is_not() -> None:
    def fn(rank: int, world_size: int) -> tuple[tuple[int, ...], bool]:
        region = _open(rank, world_size)
        pids = region.memory.cast("q")
        pids[rank] = os.getpid()
        dist.barrier()
        if rank == 1:
            time.sleep(30)
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
        dist.barrier(group=survivors)
        while_stopped = region.dead()
        dist.barrier(group=survivors)
        if rank == 0:
            os.kill(pids[1], signal.SIGKILL)
        noticed = _wait_for(lambda: region.dead() == (1,))
        dist.barrier(group=survivors)  # who returns closes its region
        return while_stopped, noticed

    def main(rank: int, world_size: int) -> tuple[tuple[int, ...], bool]:
        nonlocal survivors
        survivors = dist.new_group([0, 2])
        return fn(rank, world_size)

    survivors: dist.ProcessGroup | None = None
    outcomes = collect_ranks(main, 3, timeout_s=40)
    assert outcomes[1].error_type == "Died"
    assert [outcomes[0].value, outcomes[2].value] == [((), True)] * 2


def test_closed_region_counts_as_dead_and_says_so_to_its_own_rank() -> None:
    def fn(rank: int, world_size: int) -> bool:
        region = _open(rank, world_size)
        memory = region.memory
        dist.barrier()
        if rank == 0:
            memory[5] = 7
            region.close()
            with pytest.raises(CommError, match="closed"):
                region.dead()
            memory[6] = 8  # still mapped for those who hold it
        dist.barrier()
        return region.dead() == (0,) if rank else memory[5:7].tolist() == [7, 8]

    assert run_ranks(fn, 2) == [True, True]


def test_forked_child_neither_keeps_its_parent_alive_nor_harms_it() -> None:
    def fn(rank: int, world_size: int) -> tuple[bool, bool]:
        region = _open(rank, world_size)
        pids = region.memory.cast("q")
        pids[rank] = os.getpid()
        if rank == 1:
            first = os.fork()
            if first == 0:
                region.close()
                os._exit(0)
            os.waitpid(first, 0)
            second = os.fork()
            if second == 0:
                _wait_for(lambda: pids[2] == 1)  # outlives its parent
                os._exit(0)
        dist.barrier()
        alive = region.dead() == ()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        noticed = _wait_for(lambda: region.dead() == (1,), 5.0)
        pids[2] = 1
        return alive, noticed

    outcomes = collect_ranks(fn, 2, timeout_s=20)
    assert outcomes[0].value == (True, True)


@pytest.mark.parametrize("size", [2, 4])
def test_no_wake_is_lost(size: int) -> None:
    """With sleeps of 20 s between looks, one lost wake in 3,000 hands-over would be seen."""

    def fn(rank: int, world_size: int) -> bool:
        shm_region._SLICE_S = 20.0
        region = _open(rank, world_size)
        region._longest_spin_s = region._spin_s = 0.0
        words = region.memory.cast("i")
        for turn in range(3000):
            if turn % world_size == rank:
                words[3] = turn + 1
                region.wake(3)
            elif not region.wait_until(3, lambda: words[3] > turn, 10.0):  # noqa: B023 - at once
                return False
        return True

    started = time.monotonic()
    assert run_ranks(fn, size, timeout_s=50) == [True] * size
    assert time.monotonic() - started < 20


def test_change_without_a_wake_is_noticed_and_no_change_ends_at_the_limit() -> None:
    def fn(rank: int, world_size: int) -> tuple[bool, bool, bool]:
        region = _open(rank, world_size)
        started = time.monotonic()
        words = region.memory.cast("i")
        nothing = region.wait_until(0, lambda: words[0] != 0, 0.2)
        limited = 0.2 <= time.monotonic() - started < 10
        dist.barrier()
        if rank == 0:
            time.sleep(0.2)
            words[0] = -1
        return region.wait_until(0, lambda: words[0] != 0, 20.0), nothing, limited

    assert run_ranks(fn, 2) == [(True, False, True)] * 2


def test_other_threads_run_while_a_rank_waits() -> None:
    def fn(rank: int, world_size: int) -> int:
        region = _open(rank, world_size)
        counted = 0
        stop = threading.Event()

        def count() -> None:
            nonlocal counted
            while not stop.is_set():
                counted += 1

        thread = threading.Thread(target=count)
        thread.start()
        before = counted
        region.wait_until(0, lambda: False, 0.3)
        during = counted - before
        stop.set()
        thread.join()
        return during

    assert run_ranks(fn, 1)[0] > 1000  # type: ignore[operator]

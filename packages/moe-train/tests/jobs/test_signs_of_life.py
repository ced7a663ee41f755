"""A rank that says nothing any more is named by all others, whomever of them they waited for."""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from comm_collectives.errors import CollectiveTimeoutError
from moe_train.jobs.first_failure import naming_first_failure
from moe_train.jobs.signs_of_life import Member
from ranktest import collect_ranks, run_ranks


def notes_of(
    error: Exception, first: Callable[[], object] = dist.barrier, limit_s: float = 60.0
) -> list[str]:
    """Those of what a rank raises that trains, and does something first."""
    try:
        with naming_first_failure() as alive:
            alive.begin(limit_s=limit_s)
            first()
            while limit_s < 60.0 and not alive.silent():
                time.sleep(0.05)
            raise error
    except type(error) as raised:
        return getattr(raised, "__notes__", [])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("stopped", [2, 0])  # rank 0 holds the store
def test_a_stopped_rank_is_named_by_all_others(tmp_path: Path, stopped: int) -> None:
    port = free_port()

    def fn(rank: int, world_size: int) -> list[str]:
        method = f"tcp://127.0.0.1:{port}"
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3, timeout=limit)
        if rank == stopped:
            with naming_first_failure() as alive:
                alive.begin(limit_s=8.0)
                dist.barrier()
                (tmp_path / "process").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
        lost = CollectiveTimeoutError(f"nothing from rank {(rank + 1) % 3}")
        found = notes_of(lost, limit_s=8.0)
        (tmp_path / f"found-{rank}").touch()
        while len(list(tmp_path.glob("found-*"))) < 2:
            time.sleep(0.05)
        if rank == 1:
            os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
        return found

    ranks = collect_ranks(fn, 3, init=False, timeout_s=60)
    for rank in {0, 1, 2} - {stopped}:
        *_, last = ranks[rank].value  # type: ignore[misc]
        if stopped:
            assert last.startswith("no sign of life from rank 2 for "), last
        else:
            assert "store has not answered" in last and "rank 0, which holds it" in last


def test_ranks_that_live_or_end_by_an_error_of_their_own_are_not_missed(tmp_path: Path) -> None:
    def fn(rank: int, world_size: int) -> tuple[list[str], list[str]]:
        lost = notes_of(CollectiveTimeoutError("nothing came"))
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "second"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        if rank == 1:
            own = notes_of(ValueError("lower lr"), lambda: None)
            store.set("rank 1 has failed", "")
            return lost, own
        later = partial(store.wait, ["rank 1 has failed"])
        return lost, notes_of(CollectiveTimeoutError("nothing from rank 1"), later)

    (lost, first), (also_lost, own), (last_lost, third) = run_ranks(fn, 3)
    assert lost == also_lost == last_lost == own == []
    assert first == third == ["the job's first failure: rank 1: ValueError: lower lr"]


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store, self.asked = dist.HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


def members(store: Any, size: int, *, limit_s: float) -> list[Member]:
    return [Member(store, rank=rank, size=size, limit_s=limit_s) for rank in range(size)]


def test_a_rank_whose_count_stands_still_for_half_the_limit_is_silent_until_it_counts() -> None:
    ranks = members(dist.HashStore(), 6, limit_s=40.0)
    for now_s in range(100, 120):
        for rank in ranks[:2] + ranks[3:]:
            rank.count(float(now_s))
    assert ranks[1].silent() == []  # the third one has not begun
    for now_s in range(120, 145):
        for rank in ranks:
            if rank is not ranks[2] or now_s <= 123:
                rank.count(float(now_s))
        assert ranks[1].silent() == ([2] if now_s >= 143 else []), now_s
    ranks[2].count(145.0)
    assert ranks[1].silent() == []  # before any other rank has looked


def test_an_observer_that_was_held_up_takes_nobody_for_silent() -> None:
    ranks = members(dist.HashStore(), 3, limit_s=4.0)
    for now_s in (0.0, 1.0, 100.0, 200.0):  # one count of each rank in all that time
        for rank in ranks:
            rank.count(now_s)
        assert all(rank.silent() == [] for rank in ranks)


def test_a_rank_that_has_ended_is_not_missed_whatever_its_thread_still_counts() -> None:
    ranks = members(dist.HashStore(), 4, limit_s=4.0)
    for rank in ranks:
        rank.count(0.0)
    ranks[1].end()
    for now_s in range(1, 10):
        ranks[1].count(float(now_s))
        for rank in (ranks[0], ranks[2], ranks[3]):
            rank.count(float(now_s))
    assert ranks[0].silent() == []


def test_thousands_of_ranks_ask_a_store_as_little_as_a_few_do() -> None:
    def asked(size: int) -> tuple[float, int]:
        """Counts a second, and what a rank that has lost another one asks."""
        store = CountingStore()
        ranks = members(store, size, limit_s=120.0)
        for now_s in (0, 1, 2, 3, 200):
            for rank in ranks:
                if rank is not ranks[1] or not now_s:
                    rank.count(float(now_s))
        before = store.asked
        assert ranks[3].silent() == [1]
        return size / ranks[3].period_s, store.asked - before

    assert asked(8) == (16.0, 5)
    assert asked(4000) == (200.0, 5)

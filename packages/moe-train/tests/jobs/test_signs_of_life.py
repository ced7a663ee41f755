"""A rank that says nothing any more is named by all others, whomever of them they waited for."""

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from comm_collectives.errors import CollectiveTimeoutError
from moe_train.jobs.first_failure import naming_first_failure
from ranktest import collect_ranks, run_ranks


def notes_of(error: Exception, *, after_s: float = 0.0) -> list[str]:
    """Those of what a rank raises that trains."""
    try:
        with naming_first_failure() as alive:
            alive.begin()
            dist.barrier()
            time.sleep(after_s)
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
                alive.begin()
                dist.barrier()
                (tmp_path / "process").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
        found = notes_of(CollectiveTimeoutError(f"nothing from rank {(rank + 1) % 3}"))
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
        # All count, and the last of them while the others have ended.
        lost = notes_of(CollectiveTimeoutError("nothing came"), after_s=rank / 2)
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "second"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        if rank == 1:
            return lost, notes_of(ValueError("lower lr"))
        return lost, notes_of(CollectiveTimeoutError("nothing from rank 1"), after_s=0.3)

    (lost, first), (also_lost, own), (last_lost, third) = run_ranks(fn, 3)
    assert lost == also_lost == last_lost == own == []
    assert first == third == ["the job's first failure: rank 1: ValueError: lower lr"]

"""Ranks that fail one after the other name the one that was first."""

import time

import torch.distributed as dist

from moe_train.jobs.first_failure import naming_first_failure
from ranktest import run_ranks


def notes_of(error: Exception, *, wait_s: float = 0.0) -> list[str]:
    time.sleep(wait_s)
    try:
        with naming_first_failure():
            raise error
    except type(error) as raised:
        return getattr(raised, "__notes__", [])


def test_who_fails_later_names_the_first_failure() -> None:
    def fn(rank: int, world_size: int) -> list[str]:
        if rank:
            dist.barrier()  # behind the first one's failure
        found = notes_of(OSError(f"disk of rank {rank}"))
        if rank == 0:
            dist.barrier()
        return found

    first, *others = run_ranks(fn, 3)
    assert first == []
    assert others == [["the job's first failure: rank 0: OSError: disk of rank 0"]] * 2


def test_what_all_ranks_raise_alike_has_no_note() -> None:
    assert run_ranks(lambda *_: notes_of(ValueError("lower lr")), 2) == [[], []]
    assert notes_of(ValueError("without process groups")) == []

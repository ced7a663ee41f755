"""Ranks that wait for each other's marks."""

import time

import pytest

from ranktest import mark, run_ranks, until_marked


def test_a_rank_goes_on_once_another_has_marked() -> None:
    def fn(rank: int, world_size: int) -> float:
        if rank == 1:
            time.sleep(0.2)
            now_s = time.monotonic()
            mark("here")
            return now_s
        until_marked("here")
        return time.monotonic()

    for init in (True, False):
        waited, marked = run_ranks(fn, 2, init=init)
        assert waited >= marked


def test_a_mark_that_never_comes_is_named() -> None:
    def fn(rank: int, world_size: int) -> None:
        mark("other")
        with pytest.raises(TimeoutError, match=r"no rank has marked 'here' in 0\.1 s"):
            until_marked("here", timeout_s=0.1)

    run_ranks(fn, 1)


def test_marks_outside_of_ranks_are_refused() -> None:
    with pytest.raises(RuntimeError, match="run_ranks"):
        mark("here")

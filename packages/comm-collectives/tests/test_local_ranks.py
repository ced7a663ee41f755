"""Spawned ranks: what they return, and that a failing one is named at once."""

import time

import pytest

from comm_collectives.errors import CommError
from comm_collectives.local_ranks import run_local


def test_each_rank_runs_the_entry_in_a_group() -> None:
    assert run_local("torch.distributed:get_backend", 2, timeout_s=60) == ["gloo", "gloo"]


def test_failing_rank_is_named_long_before_the_limit() -> None:
    started = time.monotonic()
    with pytest.raises(CommError, match=r"rank [01] failed: ModuleNotFoundError"):
        run_local("no_such_module:main", 2, timeout_s=300)
    assert time.monotonic() - started < 60


def test_dying_rank_is_named() -> None:
    with pytest.raises(CommError, match="rank 0 died without a word"):
        run_local("sys:exit", 1, timeout_s=60)

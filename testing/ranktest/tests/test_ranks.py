import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ranktest import RanksFailedError, collect_ranks, run_ranks


def test_every_rank_runs_in_its_own_process_and_they_talk() -> None:
    def fn(rank: int, world_size: int) -> tuple[int, float]:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return os.getpid(), x.item()

    results = run_ranks(fn, 3)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4
    assert [total for _, total in results] == [3.0] * 3


def test_a_false_assertion_on_one_rank_fails_the_run_with_its_traceback() -> None:
    def fn(rank: int, world_size: int) -> None:
        assert rank != 1, "canary on rank 1"

    with pytest.raises(RanksFailedError, match="canary on rank 1"):
        run_ranks(fn, 2, timeout_s=20)


def test_a_killed_rank_is_reported_as_died() -> None:
    def fn(rank: int, world_size: int) -> str:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    dead, alive = collect_ranks(fn, 2, timeout_s=20)
    assert (dead.error_type, dead.exitcode) == ("Died", -signal.SIGKILL)
    assert alive.value == "alive"


def test_a_hanging_rank_is_killed_at_the_deadline_and_says_where_it_was() -> None:
    start = time.monotonic()

    def waits_for_ever() -> None:
        time.sleep(600)

    hung, fine = collect_ranks(
        lambda rank, _: waits_for_ever() if rank == 0 else rank, 2, timeout_s=3, init=False
    )
    assert hung.error_type == "Timeout"
    assert "in waits_for_ever" in str(hung.error)
    assert fine.value == 1
    assert time.monotonic() - start < 30


def test_backward_runs_in_a_forked_rank_after_backward_in_the_parent() -> None:
    def fn(rank: int, world_size: int) -> float:
        w = torch.randn(64, 64, requires_grad=True)
        (w @ w).sum().backward()
        return float(w.grad.isfinite().all())

    w = torch.randn(512, 512, requires_grad=True)
    (w @ w).sum().backward()
    assert run_ranks(fn, 2) == [1.0, 1.0]


def test_a_rank_that_is_done_does_not_disturb_a_slower_peer() -> None:
    def fn(rank: int, world_size: int) -> int:
        if rank == 1:
            time.sleep(0.5)
        group = dist.new_group([0, 1])
        if rank == 1:
            time.sleep(0.5)
            assert isinstance(group, dist.ProcessGroup)
        return rank

    assert run_ranks(fn, 2, timeout_s=30) == [0, 1]

"""Failures: who, which call, which peer; always within seconds."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.calls import classify, first_line
from ranktest import collect_ranks, run_ranks

_LIMIT_S = 0.5
_SECONDS = 8.0  # limit + enquiry, with room for a busy machine


def _failure(fn: object) -> tuple[str, str, float]:
    """Name and text of what `fn()` raises, and after how long."""
    started = time.monotonic()
    with pytest.raises(cc.CommError) as caught:
        fn()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def _calls(x: torch.Tensor) -> dict[str, object]:
    idx = torch.zeros(3, 1, dtype=torch.int64)
    return {
        "all_to_all": lambda: cc.all_to_all(x, input_splits=[1, 1, 1], timeout_s=_LIMIT_S),
        "all_reduce": lambda: cc.all_reduce(x, timeout_s=_LIMIT_S),
        "broadcast_nested": lambda: cc.broadcast_nested({"x": x}, src=2, timeout_s=_LIMIT_S),
        "dispatch": lambda: cc.dispatch(
            x, idx, torch.ones(3, 1), num_experts=3, group=dist.group.WORLD, timeout_s=_LIMIT_S
        ),
    }


@pytest.mark.parametrize("name", ["all_to_all", "dispatch"])
def test_rank_that_never_calls_is_named(name: str) -> None:
    def fn(rank: int, world_size: int) -> object:
        cc.all_reduce(torch.ones(1))
        if rank == 2:
            time.sleep(_LIMIT_S + 2.5)  # past the limit and the enquiry of the others
            return None
        return _failure(_calls(torch.ones(3, 2))[name])

    for rank, outcome in enumerate(run_ranks(fn, 3, timeout_s=30)[:2]):
        kind, text, elapsed_s = outcome
        assert kind == "CollectiveTimeoutError"
        assert f"rank {rank}: {name}" in text
        assert "call 2 of group (0, 1, 2)" in text
        assert "did not arrive: rank 2 (no report" in text
        assert f"arrived: rank {1 - rank}" in text
        assert elapsed_s < _SECONDS


@pytest.mark.parametrize("name", ["all_reduce", "broadcast_nested", "dispatch"])
def test_killed_rank_is_named(name: str) -> None:
    def fn(rank: int, world_size: int) -> object:
        cc.all_reduce(torch.ones(1))
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return _failure(_calls(torch.ones(3, 2))[name])

    outcomes = collect_ranks(fn, 3, timeout_s=30)
    assert outcomes[2].error_type == "Died"
    for rank in (0, 1):
        assert outcomes[rank].ok, outcomes[rank].error
        kind, text, elapsed_s = outcomes[rank].value
        # A rank may reach its limit before the broken connection shows.
        assert kind in ("PeerFailedError", "CollectiveTimeoutError")
        assert f"rank {rank}: {name}" in text
        assert "did not arrive: rank 2" in text
        assert f"arrived: rank {1 - rank}" in text
        assert elapsed_s < _SECONDS


def test_rank_killed_inside_a_call_is_noticed() -> None:
    def fn(rank: int, world_size: int) -> object:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            cc.all_reduce(torch.ones(1), group=None)
        if rank == 2:
            time.sleep(1.0)
        return _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=10))

    outcomes = collect_ranks(fn, 3, timeout_s=30)
    assert outcomes[1].error_type == "Died"
    for rank in (0, 2):
        kind, text, elapsed_s = outcomes[rank].value
        assert kind == "PeerFailedError", text
        assert "rank 1" in text
        assert elapsed_s < _SECONDS


def test_failure_in_backward_is_named() -> None:
    def fn(rank: int, world_size: int) -> object:
        x = torch.ones(2, 2, requires_grad=True)
        y = cc.all_to_all(x, timeout_s=_LIMIT_S)
        if rank == 1:
            time.sleep(_LIMIT_S + 2.5)  # past the limit and the enquiry of the others
            return None
        return _failure(lambda: y.sum().backward())

    kind, text, _ = run_ranks(fn, 2, timeout_s=30)[0]
    assert kind == "CollectiveTimeoutError"
    assert "rank 0: all_to_all (backward) call 2" in text
    assert "did not arrive: rank 1" in text


def test_rank_in_another_call_is_said_to_be_there() -> None:
    def fn(rank: int, world_size: int) -> object:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        if rank == 0:
            time.sleep(0.3)
            return _failure(lambda: cc.all_reduce(torch.ones(1), group=pairs[0], timeout_s=0.5))
        if rank == 1:
            return _failure(lambda: cc.all_reduce(torch.ones(1), group=pairs[1], timeout_s=0.5))
        time.sleep(4)
        return None

    outcomes = run_ranks(fn, 3, timeout_s=30)
    assert "of group (0, 1)" in outcomes[0][1]
    assert "did not arrive: rank 1 (last " in outcomes[0][1]
    assert "did not arrive: rank 2 (no report" in outcomes[1][1]


def test_rank_that_waits_since_long_counts_as_arrived() -> None:
    def fn(rank: int, world_size: int) -> object:
        if rank == 1:
            return _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=4))
        if rank == 0:
            time.sleep(1.3)
            return _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=0.5))
        time.sleep(7)
        return None

    _, text, _ = run_ranks(fn, 3, timeout_s=40)[0]
    assert "did not arrive: rank 2 (no report" in text
    assert "arrived: rank 1" in text


def test_late_rank_is_no_failure() -> None:
    def fn(rank: int, world_size: int) -> float:
        time.sleep(1.5 * rank)
        return float(cc.all_reduce(torch.ones(1), timeout_s=10))

    assert run_ranks(fn, 2) == [2.0, 2.0]


def test_group_works_again_after_a_timeout() -> None:
    def fn(rank: int, world_size: int) -> object:
        if rank == 0:
            name, _, _ = _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=0.5))
            assert name == "CollectiveTimeoutError"
        else:
            time.sleep(3)
            cc.all_reduce(torch.ones(1))
        return cc.all_to_all(torch.full((2,), rank)).tolist()

    assert run_ranks(fn, 2, timeout_s=30) == [[0, 1], [0, 1]]


def test_classify_tells_limits_and_lost_peers_apart() -> None:
    assert classify(RuntimeError("Operation timed out!"), 2.0) == (
        cc.CollectiveTimeoutError,
        "timed out after 2 s",
    )
    assert classify(RuntimeError("Connection closed by peer"), None)[0] is cc.PeerFailedError
    assert classify(RuntimeError("Invalid scalar type"), None)[0] is cc.CommError
    assert first_line(RuntimeError("")) == "RuntimeError"


def test_limit_has_to_be_positive() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match="timeout_s=0 must be positive"):
            cc.all_reduce(torch.ones(1), timeout_s=0)

    run_ranks(fn, 1)

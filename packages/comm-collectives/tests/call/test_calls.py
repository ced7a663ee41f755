"""Failures: who, which call, which peer; always within seconds."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import comm_collectives as cc
from comm_collectives.call.groups.groups import group_state
from comm_collectives.moe.options import MoeOptions
from ranktest import collect_ranks, mark, run_ranks, until_marked

_LIMIT_S = 0.5
_SECONDS = 8.0  # limit + enquiry, with room for a busy machine


def _failure(fn: Callable[[], object]) -> tuple[str, str, float]:
    """Name and text of what `fn()` raises, and after how long."""
    started = time.monotonic()
    with pytest.raises(cc.CommError) as caught:
        fn()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def _calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    idx = torch.zeros(3, 1, dtype=torch.int64)
    return {
        "all_to_all": lambda: cc.all_to_all(x, input_splits=[1, 1, 1], timeout_s=_LIMIT_S),
        "all_reduce": lambda: cc.all_reduce(x, timeout_s=_LIMIT_S),
        "broadcast_nested": lambda: cc.broadcast_nested({"x": x}, src=2, timeout_s=_LIMIT_S),
        "dispatch": lambda: cc.dispatch(
            x,
            idx,
            torch.ones(3, 1),
            num_experts=3,
            group=dist.group.WORLD,
            options=MoeOptions(timeout_s=_LIMIT_S),
        ),
    }


def _across_hosts() -> None:
    """Let the default group do without shared memory, all else being as it is by default."""
    state = group_state(None)
    state.frames, state.may_share_memory = None, False


@pytest.mark.parametrize("name", ["all_to_all", "all_reduce", "dispatch"])
@pytest.mark.parametrize("place", ["one host", "across hosts"])
def test_rank_that_never_calls_is_named(name: str, place: str) -> None:
    def fn(rank: int, world_size: int) -> object:
        if place == "across hosts":
            _across_hosts()
        cc.all_reduce(torch.ones(1))
        if rank == 2:
            for other in (0, 1):
                until_marked(f"rank {other} gave up")
            return None
        outcome = _failure(_calls(torch.ones(3, 2))[name])
        mark(f"rank {rank} gave up")
        return outcome

    for rank, outcome in enumerate(run_ranks(fn, 3, timeout_s=30)[:2]):
        kind, text, elapsed_s = outcome
        assert kind == "CollectiveTimeoutError"
        assert f"rank {rank}: {name}" in text
        assert "call 2 of group (0, 1, 2) timed out a" in text
        assert "did not arrive: rank 2 (last in all_reduce call 1)" in text
        assert f"arrived: rank {1 - rank}" in text
        assert elapsed_s < _SECONDS


def test_rank_killed_before_its_first_call_is_named() -> None:
    def fn(rank: int, world_size: int) -> object:
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=60))

    for outcome in collect_ranks(fn, 3)[:2]:
        kind, text, elapsed_s = outcome.value
        assert kind == "PeerFailedError"
        assert "all_reduce call 1 of group (0, 1, 2) lost a peer: rank 2 has ended" in text
        assert elapsed_s < _SECONDS


def test_rank_that_hosts_the_store_is_named_when_killed_before_its_first_call(
    tmp_path: Path,
) -> None:
    """As with `tcp://`, where the store ends with rank 0, and its addresses with it."""
    note = tmp_path / "port"

    def fn(rank: int, world_size: int) -> object:
        dist.barrier()  # some rank may still connect
        dist.destroy_process_group()
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            note.with_suffix(".new").write_text(str(store.port))
            note.with_suffix(".new").rename(note)
        while not note.exists():
            time.sleep(0.01)
        if rank:
            store = dist.TCPStore("127.0.0.1", int(note.read_text()))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=60))

    for outcome in collect_ranks(fn, 3)[1:]:
        kind, text, elapsed_s = outcome.value
        assert kind == "PeerFailedError"
        assert "all_reduce call 1 of group (0, 1, 2) lost a peer: rank 0 has ended" in text
        assert elapsed_s < _SECONDS


def test_rank_late_for_its_first_call_is_waited_for() -> None:
    """Also by a peer that looks several times whether it has ended."""

    def fn(rank: int, world_size: int) -> float:
        time.sleep(2.0 * rank)
        total = cc.all_reduce(torch.ones(1), timeout_s=60)
        dist.all_reduce(total)
        if rank == 0:
            dist.send(total, 1)
        else:
            dist.recv(total, 0)
        return total.item()

    assert run_ranks(fn, 2) == [4.0, 4.0]


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
        assert kind == "PeerFailedError", text
        assert f"rank {rank}: {name}" in text
        assert "rank 2 has ended or given up its group" in text
        assert elapsed_s < _SECONDS


@pytest.mark.parametrize("place", ["one host", "across hosts"])
@pytest.mark.parametrize("num_elements", [1, 100_000])
def test_rank_killed_inside_a_call_is_noticed(num_elements: int, place: str) -> None:
    def fn(rank: int, world_size: int) -> object:
        x = torch.ones(num_elements)
        if place == "across hosts":
            _across_hosts()
        cc.all_reduce(x)
        if rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            cc.all_reduce(x)
        if rank == 2:
            time.sleep(1.0)
        return _failure(lambda: cc.all_reduce(x, timeout_s=10))

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
            until_marked("gave up")
            return y.shape
        outcome = _failure(lambda: y.sum().backward())
        mark("gave up")
        return outcome

    kind, text, _ = run_ranks(fn, 2, timeout_s=30)[0]
    assert kind == "CollectiveTimeoutError"
    assert "rank 0: all_to_all (backward) call 2" in text
    assert "did not arrive: rank 1" in text


def test_rank_in_another_call_is_said_to_be_there() -> None:
    def fn(rank: int, world_size: int) -> object:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        if rank == 2:
            for other in (0, 1):
                until_marked(f"rank {other} gave up")
            return None
        time.sleep(0.3 * (1 - rank))
        outcome = _failure(lambda: cc.all_reduce(torch.ones(1), group=pairs[rank], timeout_s=0.5))
        mark(f"rank {rank} gave up")
        return outcome

    outcomes = run_ranks(fn, 3, timeout_s=30)
    assert "of group (0, 1)" in outcomes[0][1]
    assert "did not arrive: rank 1 (not seen" in outcomes[0][1]
    assert "did not arrive: rank 2 (not seen" in outcomes[1][1]


def test_rank_that_waits_since_long_counts_as_arrived() -> None:
    def fn(rank: int, world_size: int) -> object:
        cc.all_reduce(torch.ones(1))
        if rank < 2:
            time.sleep(1.3 * (1 - rank))
            outcome = _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=[0.5, 4][rank]))
            mark(f"rank {rank} gave up")
            return outcome
        for other in (0, 1):
            until_marked(f"rank {other} gave up")
        return None

    _, text, _ = run_ranks(fn, 3, timeout_s=40)[0]
    assert "did not arrive: rank 2 (last in all_reduce call 1)" in text
    assert "arrived: rank 1" in text


def test_rank_that_comes_after_the_others_gave_up_is_told_so() -> None:
    def fn(rank: int, world_size: int) -> object:
        cc.all_reduce(torch.ones(1))
        if rank == 1:
            until_marked("gave up")
        outcome = _failure(lambda: cc.all_reduce(torch.ones(1), timeout_s=_LIMIT_S))
        mark("gave up")
        return [*outcome, cc.all_to_all(torch.full((2,), rank)).tolist()]

    first, second = run_ranks(fn, 2, timeout_s=30)
    assert first[0] == second[0] == "CollectiveTimeoutError"
    assert "rank 0 failed in it with a CollectiveTimeoutError" in second[1]
    # Both failed in the same call, so the group goes on.
    assert first[3] == second[3] == [0, 1]


def test_late_rank_is_no_failure() -> None:
    def fn(rank: int, world_size: int) -> float:
        time.sleep(1.5 * rank)
        return float(cc.all_reduce(torch.ones(1), timeout_s=10))

    assert run_ranks(fn, 2) == [2.0, 2.0]


def _differing_calls(rank: int) -> dict[str, Callable[[], object]]:
    big = torch.ones(3000)
    return {
        "dtype": lambda: cc.all_reduce(big.int() if rank == 1 else big),
        "op": lambda: cc.all_reduce(big, op="max" if rank == 1 else "sum"),
        "shape": lambda: cc.all_reduce(big[: 3000 - rank % 2]),
        "operation": lambda: cc.all_to_all(big) if rank == 1 else cc.all_reduce(big),
        "row shape": lambda: cc.all_to_all(big.view(-1, 2 if rank == 1 else 1)),
        "call site": (
            (lambda: cc.all_reduce(big)),  # one line ...
            (lambda: cc.all_reduce(big)),  # ... and another
        )[rank == 1],
    }


@pytest.mark.parametrize("place", ["one host", "across hosts"])
def test_mismatch_is_the_same_error_on_every_rank_and_names_what_differs(place: str) -> None:
    def fn(rank: int, world_size: int) -> object:
        if place == "across hosts":
            _across_hosts()
        found = {name: _failure(call) for name, call in _differing_calls(rank).items()}
        return found, float(cc.all_reduce(torch.ones(1)))

    outcomes = run_ranks(fn, 3)
    for rank, (found, total) in enumerate(outcomes):
        assert total == 3.0
        for name, (kind, text, elapsed_s) in found.items():
            assert kind == "MismatchError", text
            assert f"rank {rank}: " in text
            assert "of group (0, 1, 2): " + name in text
            assert "ranks 0, 2: " in text
            assert "rank 1: " in text
            assert text.count("test_calls.py:") == 2
            assert elapsed_s < 2.0


def test_refused_arguments_are_the_same_error_on_every_rank() -> None:
    def fn(rank: int, world_size: int) -> object:
        x = torch.ones(4)
        first = _failure(lambda: cc.all_reduce(x, op="sum" if rank else "mean"))
        second = _failure(lambda: cc.all_to_all(x, input_splits=[2, 2] if rank else [2.5, 1.5]))
        return first, second

    for first, second in run_ranks(fn, 2):
        assert first[0] == "RefusedError"
        assert "refused: rank 0: op='mean' is unknown" in first[1]
        assert second[0] == "RefusedTypeError"
        assert "refused: rank 0: input_splits=[2.5, 1.5] must be" in second[1]


def test_named_call_sites_are_one_call() -> None:
    def fn(rank: int, world_size: int) -> float:
        if rank == 0:
            with cc.call_site("total"):
                return float(cc.all_reduce(torch.ones(1)))
        with cc.call_site("total"):
            return float(cc.all_reduce(torch.ones(1)))

    assert run_ranks(fn, 2) == [2.0, 2.0]


def test_calls_of_which_one_has_no_arguments_in_common_differ_across_hosts() -> None:
    def fn(rank: int, world_size: int) -> object:
        _across_hosts()
        big = torch.ones(3000)
        cc.all_reduce(torch.ones(1))
        if rank == 0:
            return _failure(lambda: cc.all_reduce(big, timeout_s=20))
        return _failure(lambda: cc.broadcast_nested({"x": big}, src=0, timeout_s=20))

    for rank, (kind, text, elapsed_s) in enumerate(run_ranks(fn, 2, timeout_s=40)):
        assert kind == "MismatchError", (rank, text)
        assert "all_reduce(" in text
        assert "broadcast_nested(" in text
        assert elapsed_s < 2.0


def test_limit_has_to_be_positive() -> None:
    def fn(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match="timeout_s=0 must be positive"):
            cc.all_reduce(torch.ones(1), timeout_s=0)

    run_ranks(fn, 1)

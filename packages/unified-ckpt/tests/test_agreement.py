import time

import pytest
import torch.distributed as dist

from ranktest import collect_ranks, run_ranks
from unified_ckpt.agreement import Agreement
from unified_ckpt.errors import SaveArgumentError, SaveError, SavePeerError


def make(timeout_s: float = 20.0) -> Agreement:
    return Agreement(None, timeout_s=timeout_s, subject="save('x')")


def test_payloads_of_any_length_come_back_by_rank() -> None:
    def fn(rank: int, world_size: int) -> list[list]:
        agreement = make()
        with agreement.phase("one") as phase:
            phase.payload = {"rank": rank, "text": "é" * 1000 * rank}
        return [phase.results, agreement.gather("two", None)]

    expected = [{"rank": r, "text": "é" * 1000 * r} for r in range(3)]
    assert run_ranks(fn, 3) == [[expected, [None] * 3]] * 3


def test_without_process_groups_one_rank_agrees_with_itself() -> None:
    agreement = make()
    assert (agreement.rank, agreement.size, agreement.gather("x", 3)) == (0, 1, [3])
    message = r"save\('x'\): rank 0 failed in 'p': KeyError: 'k'"
    with pytest.raises(SaveError, match=message), agreement.phase("p"):
        raise KeyError("k")


def test_an_exception_on_any_rank_raises_on_every_rank_with_its_cause() -> None:
    def fn(rank: int, world_size: int) -> tuple[str, str, bool]:
        agreement = make()
        with pytest.raises(SaveError) as caught, agreement.phase("p"):
            if rank:
                raise OSError(5, f"broken on {rank}")
        agreement.gather("still usable", rank)
        kind = type(caught.value).__name__
        return str(caught.value), kind, isinstance(caught.value.__cause__, OSError)

    first, second, third = run_ranks(fn, 3)
    assert first[0] == second[0] == third[0]
    assert "rank 1 failed in 'p': OSError: [Errno 5] broken on 1; rank 2 failed" in first[0]
    assert [first[1:], second[1:]] == [("SaveError", False), ("SaveError", True)]


def test_only_a_phase_that_checks_arguments_blames_the_caller() -> None:
    for checks, kind in ((True, SaveArgumentError), (False, SaveError)):
        with pytest.raises(SaveError) as caught, make().phase("p", checks_arguments=checks):
            raise ValueError("x")
        assert type(caught.value) is kind


def test_an_interrupt_reaches_the_peers_and_stays_an_interrupt() -> None:
    def fn(rank: int, world_size: int) -> str:
        expected = KeyboardInterrupt if rank == 0 else SaveError
        with pytest.raises(expected) as caught, make().phase("p"):
            if rank == 0:
                raise KeyboardInterrupt
        return str(caught.value)

    assert "rank 0 failed in 'p': KeyboardInterrupt" in str(run_ranks(fn, 2)[1])


def test_a_failed_rank_whose_peer_is_gone_still_says_why_it_failed() -> None:
    def fn(rank: int, world_size: int) -> str:
        if rank == 1:
            time.sleep(2.0)
            return ""
        with (
            pytest.raises(SaveError, match=r"OSError: mine; the peers could not be told") as caught,
            make(timeout_s=0.5).phase("p"),
        ):
            raise OSError("mine")
        return str(caught.value)

    assert "ranks [1] did not arrive" in str(collect_ranks(fn, 2, timeout_s=30)[0].value)


def test_ranks_of_a_group_are_named_by_their_rank_in_the_world() -> None:
    def fn(rank: int, world_size: int) -> str | None:
        group = dist.new_group([0, 2])
        if rank == 1:
            return None
        agreement = Agreement(group, timeout_s=20.0, subject="save('x')")
        with pytest.raises(SaveError) as caught, agreement.phase("p"):
            if rank == 2:
                raise OSError("x")
        return str(caught.value)

    assert "rank 2 failed in 'p'" in str(run_ranks(fn, 3)[0])


def test_a_dead_peer_is_reported_at_once() -> None:
    def fn(rank: int, world_size: int) -> float:
        begin = time.monotonic()
        if rank == 1:
            raise RuntimeError("dies")
        with pytest.raises(SavePeerError, match=r"ranks \[1\] did not arrive"):
            make(timeout_s=20.0).gather("p", None)
        return time.monotonic() - begin

    outcome = collect_ranks(fn, 2, timeout_s=30)[0]
    assert outcome.ok and outcome.value < 10.0, outcome

"""Deliberate mistakes: what counts as caught, and that an error which says too little does not."""

import time

import pytest
import torch

from comm_collectives.call.agreement.agreement import AgreementPolicy
from comm_collectives.call.groups.groups import group_state
from comm_collectives.checking.matrix import check_mistakes
from comm_collectives.checking.misuse.outcome import (
    At,
    Misuse,
    judge_misuse,
    judge_raw_misuse,
    nobody,
    run_misuse,
    run_raw_misuse,
    the_odd_one,
    the_others,
)
from comm_collectives.checking.misuse.table import MISUSE_OF, MISUSES, RAW
from comm_collectives.checking.rank_side import HERE, WIRE
from comm_collectives.checking.results.results import (
    CaseResult,
    Verdict,
)
from comm_collectives.checking.table import total
from comm_collectives.collectives.reduction import all_reduce
from comm_collectives.errors import MismatchError
from ranktest import run_ranks

_DTYPE = MISUSE_OF["dtype differs, same bytes"]
_PLACES = MISUSE_OF["same shape, other order"]
_RIGHT = CaseResult(verdict=Verdict.RIGHT)
_SILENT = CaseResult(verdict=Verdict.WRONG, detail="not a word")


def _raised(text: str, error: str = "RuntimeError", elapsed_s: float = 0.1) -> CaseResult:
    return CaseResult(verdict=Verdict.FAILED, detail=text, error=error, elapsed_s=elapsed_s)


@pytest.mark.parametrize("place", [HERE, WIRE])
def test_every_mistake_is_the_same_error_on_every_rank_and_names_who_and_where(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On four ranks; on two the command `check` makes them, see `test_cli`."""
    outcomes = check_mistakes(4, place)
    with capsys.disabled():
        print(f"\n4 ranks, {place}: {total('comm_collectives', outcomes)}")
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert [f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}" for outcome in bad] == []
    assert len(outcomes) == len(MISUSES) + 1
    assert [outcome.verdict for outcome in outcomes if outcome.is_canary] == [Verdict.WRONG]


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([_RIGHT, _RIGHT], Verdict.REFUSED),
        ([_SILENT, _SILENT], Verdict.WRONG),
        ([_RIGHT, _SILENT], Verdict.WRONG),
        ([_RIGHT, _raised("rank 1: does not say what")], Verdict.FAILED),
        ([_raised("Timed out waiting"), _SILENT], Verdict.TIMED_OUT),
        (
            [_raised("closed"), CaseResult(verdict=Verdict.ABORTED, detail="SIGABRT")],
            Verdict.ABORTED,
        ),
    ],
)
def test_mistake_is_caught_only_if_it_ends_well_on_every_rank(
    results: list[CaseResult], verdict: str
) -> None:
    assert judge_misuse(results, _DTYPE)[0] == verdict


def test_mistake_that_is_none_has_to_end_right() -> None:
    harmless = Misuse(name="harmless", run=lambda at: "", raised_by=nobody)
    assert judge_misuse([_RIGHT, _RIGHT], harmless)[0] == Verdict.RIGHT
    assert judge_misuse([_RIGHT, _SILENT], harmless)[0] == Verdict.WRONG


def test_rank_that_dies_on_purpose_does_not_count() -> None:
    dies = Misuse(name="dies", run=lambda at: None, raised_by=the_others, dies=True)
    gone = CaseResult(verdict=Verdict.ABORTED, detail="SIGKILL")
    assert judge_misuse([_RIGHT, gone], dies)[0] == Verdict.REFUSED
    assert judge_misuse([gone, gone], dies)[0] == Verdict.ABORTED


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([_raised("x"), _raised("y")], Verdict.REFUSED),
        ([_raised("x"), _raised("y", error="ValueError")], Verdict.FAILED),
        ([_raised("x"), _raised("y", elapsed_s=1.5)], Verdict.FAILED),
        ([_raised("x"), _raised("timed out")], Verdict.TIMED_OUT),
        ([_raised("x"), _SILENT], Verdict.FAILED),
        ([_SILENT, _SILENT], Verdict.WRONG),
    ],
)
def test_raw_mistake_is_caught_if_every_rank_raises_the_same_class_at_once(
    results: list[CaseResult], verdict: str
) -> None:
    assert judge_raw_misuse(results, _DTYPE)[0] == verdict


def test_raw_call_that_returns_is_silent_where_it_has_to_raise() -> None:
    def raw(returned: str | None, **more: object) -> CaseResult:
        misuse = Misuse(name="x", run=lambda at: "", run_raw=lambda at: returned, **more)  # type: ignore[arg-type]
        return run_raw_misuse(misuse, At(0, 2))

    assert raw(None).detail == "not a word"
    assert raw(None, raised_by=the_odd_one).verdict == Verdict.RIGHT
    assert raw("wrong", raised_by=the_odd_one).verdict == Verdict.WRONG


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("rank 0: x call 3: dtype differs: rank 0: a.py:1; rank 1: b.py:2", ""),
        ("rank 0: x call 3: shape differs: rank 0: a.py:1; rank 1: b.py:2", "'dtype'"),
        ("rank 0: x call 3: dtype differs: rank 0: a.py:1; rank 1: there", "file and line of 2"),
        ("rank 0: x: dtype differs: rank 0: a.py:1; rank 1: b.py:2", "the number of the call"),
        ("x call 3: dtype differs: rank 1: b.py:2, a.py:1", "this rank"),
        ("rank 0: x call 3: dtype differs: a.py:1; others: b.py:2", "'rank 1: '"),
    ],
)
def test_error_that_says_too_little_is_not_good_enough(text: str, missing: str) -> None:
    misuse = Misuse(
        name="x",
        run=lambda at: _raise(MismatchError(text)),
        says=("dtype", "{odd}: "),
        goes_on=False,
    )
    result = run_misuse(misuse, At(0, 2))
    assert (result.verdict == Verdict.RIGHT) == (missing == "")
    assert missing in result.detail


def test_error_of_another_class_or_too_late_is_not_good_enough() -> None:
    def late(at: At) -> None:
        time.sleep(0.05)
        raise RuntimeError("rank 0: call 1")

    other = Misuse(name="x", run=late, error="ValueError", goes_on=False)
    assert "it has to be a ValueError" in run_misuse(other, At(0, 2)).detail
    slow = Misuse(name="x", run=late, error="RuntimeError", within_s=0.01, goes_on=False)
    assert run_misuse(slow, At(0, 2)).detail.startswith("only after 0.")
    enough = Misuse(name="x", run=late, error="RuntimeError", goes_on=False)
    assert run_misuse(enough, At(0, 2)).verdict == Verdict.RIGHT


def test_group_that_is_out_of_step_afterwards_is_noticed() -> None:
    def out_of_step(at: At) -> None:
        if at.odd:
            raise RuntimeError("alone")
        all_reduce(torch.ones(1), timeout_s=0.2)

    misuse = Misuse(name="x", run=out_of_step, error="RuntimeError", raised_by=the_odd_one)

    def fn(rank: int, world_size: int) -> str:
        return run_misuse(misuse, At(rank, world_size)).verdict

    assert Verdict.RIGHT not in run_ranks(fn, 2)


def test_switched_off_comparison_is_a_mistake_that_goes_unnoticed() -> None:
    def fn(rank: int, world_size: int) -> tuple[CaseResult, CaseResult]:
        at = At(rank, world_size)
        seen = run_misuse(_PLACES, at)
        group_state(None).policy = AgreementPolicy(call_sites=False)
        return seen, run_misuse(_PLACES, at)

    seen, blind = zip(*run_ranks(fn, 2), strict=True)  # type: ignore[call-overload]
    assert judge_misuse(seen, _PLACES) == (Verdict.REFUSED, "")
    assert judge_misuse(blind, _PLACES) == (Verdict.WRONG, "rank 0: not a word")


def test_there_are_enough_mistakes_of_every_kind() -> None:
    assert len(MISUSES) == len({misuse.name for misuse in MISUSES}) >= 26
    assert len(RAW) >= 26
    assert all(misuse.within_s <= 1.0 for misuse in MISUSES if misuse.goes_on)
    kinds = {misuse.error for misuse in MISUSES}
    assert kinds >= {"MismatchError", "RefusedError", "RefusedTypeError", "PeerFailedError"}
    says_where = [m for m in MISUSES if m.error == "MismatchError" and m.sides is None]
    assert len(says_where) >= 20
    assert all(any("odd" in word for word in misuse.says) for misuse in says_where if misuse.raises)

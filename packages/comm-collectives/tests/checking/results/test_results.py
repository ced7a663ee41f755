"""Results of all ranks come to one verdict, and a cell's own failures are told apart."""

import time

import pytest

from comm_collectives.checking.results.results import CaseResult, Verdict, judge, run_case

_RIGHT, _WRONG = (
    CaseResult(verdict=Verdict.RIGHT),
    CaseResult(verdict=Verdict.WRONG, detail="other values"),
)


def _raised(error: str = "RefusedTypeError", text: str = "rank 0: no", elapsed_s: float = 0.1):  # type: ignore[no-untyped-def]
    return CaseResult(verdict=Verdict.FAILED, detail=text, error=error, elapsed_s=elapsed_s)


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([_RIGHT, _RIGHT], Verdict.RIGHT),
        ([_RIGHT, _WRONG], Verdict.WRONG),
        ([_raised(), _raised()], Verdict.REFUSED),
        ([_raised(), _raised(elapsed_s=1.5)], Verdict.FAILED),
        ([_raised(), _raised(error="RefusedError")], Verdict.FAILED),
        ([_RIGHT, _raised()], Verdict.FAILED),
        ([_WRONG, _raised()], Verdict.FAILED),
        ([_raised(text="timed out; did not arrive: rank 1"), _RIGHT], Verdict.FAILED),
        ([_raised(error="RuntimeError", text="Timed out waiting 10ms"), _RIGHT], Verdict.TIMED_OUT),
        ([_RIGHT, CaseResult(verdict=Verdict.TIMED_OUT, detail="no answer")], Verdict.TIMED_OUT),
        (
            [_raised(), CaseResult(verdict=Verdict.ABORTED, detail="was killed by SIGABRT")],
            Verdict.ABORTED,
        ),
    ],
)
def test_results_of_all_ranks_come_to_one_verdict(results: list[CaseResult], verdict: str) -> None:
    found, detail = judge(results)
    assert found == verdict
    assert bool(detail) == (verdict != Verdict.RIGHT)


def test_result_exception_and_silence_of_a_cell_are_told_apart() -> None:
    def fails() -> str:
        time.sleep(0.01)
        raise KeyError("x")

    assert run_case(lambda: "").verdict == Verdict.RIGHT
    assert run_case(lambda: "wrong").detail == "wrong"
    result = run_case(fails)
    assert (result.verdict, result.error) == (Verdict.FAILED, "KeyError")
    assert result.elapsed_s >= 0.01

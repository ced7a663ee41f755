"""The matrix on real ranks, two and four: which cells there are, and how each of them ends."""

import time

import pytest
import torch

from comm_collectives.base.wire import DTYPES
from comm_collectives.checking.cells.cases import (
    TORCH_SHAPES_OF,
    all_cases,
    canaries,
    expected_verdict,
    torch_cases,
)
from comm_collectives.checking.cells.problems import Case
from comm_collectives.checking.matrix import FEW_DTYPES, check_cells
from comm_collectives.checking.rank_side import HERE, WIRE
from comm_collectives.checking.results.results import (
    CaseResult,
    Verdict,
    judge,
    run_case,
)
from comm_collectives.checking.table import total

_RIGHT, _WRONG = (
    CaseResult(verdict=Verdict.RIGHT),
    CaseResult(verdict=Verdict.WRONG, detail="other values"),
)


def _raised(error: str = "RefusedTypeError", text: str = "rank 0: no", elapsed_s: float = 0.1):  # type: ignore[no-untyped-def]
    return CaseResult(verdict=Verdict.FAILED, detail=text, error=error, elapsed_s=elapsed_s)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_cell_ends_as_it_must_on_every_rank(
    num_ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = check_cells(num_ranks, HERE)
    with capsys.disabled():
        print(f"\n{num_ranks} ranks: {total('comm_collectives', outcomes)}")
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert [f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}" for outcome in bad] == []
    assert [outcome.order.what for outcome in outcomes] == [*canaries(), *all_cases()]
    assert len(outcomes) > 4000


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cells_end_as_they_must_over_the_wire(num_ranks: int) -> None:
    outcomes = check_cells(num_ranks, WIRE, FEW_DTYPES if num_ranks == 2 else FEW_DTYPES[-2:])
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    assert [f"{outcome.order.what}: {outcome.verdict}: {outcome.detail}" for outcome in bad] == []
    assert len(outcomes) > 600


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


def test_every_collective_meets_every_dtype_in_every_shape() -> None:
    cases = all_cases()
    assert len(set(cases)) == len(cases)
    names = {case.collective for case in cases if not case.collective.startswith("dispatch")}
    assert len(names) == 10 + 5
    for name in names:
        own = [case for case in cases if case.collective == name and not case.is_async]
        shapes = {case.shape for case in own}
        assert len(shapes) >= (3 if name.startswith("torch_order.") else 7)
        small = {(case.dtype, case.shape) for case in own if case.columns == 3}
        assert len(small) == len(DTYPES) * len(shapes)
        assert any(case.columns > 128 for case in own)
    assert {case.op for case in cases} == {"", "sum", "avg", "min", "max", "product"}
    ways = {case.collective for case in cases if case.collective.startswith("dispatch")}
    assert len(ways) == 9
    is_async = {case.collective for case in cases if case.is_async}
    assert (names | ways) - is_async == {"isend_tensors"}


def test_cells_in_torchs_order_are_named_after_their_functions() -> None:
    names = {case.collective for case in torch_cases()}
    assert names == {f"torch.{name}" for name in TORCH_SHAPES_OF}
    assert len(names) == 12


def test_only_reductions_without_arithmetic_are_refused_and_only_canaries_wrong() -> None:
    assert {expected_verdict(case) for case in canaries()} == {Verdict.WRONG}
    refused = [case for case in all_cases() if expected_verdict(case) == Verdict.REFUSED]
    assert {case.collective for case in refused} == {
        *("all_reduce", "reduce_scatter"),
        *("torch_order.all_reduce", "torch_order.reduce_scatter_tensor"),
    }
    assert {case.dtype for case in refused if case.op == "sum"} == {
        torch.bool,
        *(d for d in DTYPES if d.itemsize == 1 and d.is_floating_point),
    }


def test_cell_is_printed_with_all_that_it_takes_to_run_it() -> None:
    case = Case(collective="x", dtype=torch.int8, shape="even", op="sum", is_async=True)
    assert str(case) == "x int8 sum even 3 columns async"
    assert str(canaries()[0]) == ("all_to_all float32 even 3 columns (canary: result spoiled)")

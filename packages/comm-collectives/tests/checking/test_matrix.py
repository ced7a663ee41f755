"""How the matrix is run: what breaks is done again alone, and blindness is said."""

import os
import signal

import pytest
import torch

from comm_collectives.checking import matrix as check
from comm_collectives.checking import rank_side as check_ranks
from comm_collectives.checking.cells.cases import (
    canaries,
    torch_cases,
)
from comm_collectives.checking.cells.problems import EVEN, Case
from comm_collectives.checking.matrix import check_machine
from comm_collectives.checking.misuse.outcome import At, Misuse, nobody
from comm_collectives.checking.rank_side import HERE, RAW_TORCH, Order
from comm_collectives.checking.results.results import Verdict

_FLOAT = Case(collective="all_gather", dtype=torch.float32, shape=EVEN)


def test_check_that_notices_nothing_is_said_to_be_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A harness whose cells do nothing must not pass."""
    monkeypatch.setattr(check_ranks, "run_ours", lambda case: "")
    monkeypatch.setattr(check_ranks, "run_misuse", lambda misuse, at: _RIGHT)
    monkeypatch.setattr(check, "all_cases", lambda dtypes: [_FLOAT])
    report = check_machine(2, dtypes=[torch.float32])
    assert len(report.missed_canaries) == len(canaries()) + 1
    assert report.problems == []


def test_abort_and_silence_cost_only_the_cells_in_which_they_happen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(case: Case) -> str:
        if case.shape.startswith("dies"):
            os.kill(os.getpid(), signal.SIGABRT)
        return "wrong" if case.shape == "wrong" else ""

    monkeypatch.setattr(check_ranks, "run_ours", dies)
    shapes = ["fine", "dies", "fine too", "wrong", "dies again", "last"]
    orders = [Order(Case(collective="x", dtype=torch.int8, shape=shape), HERE) for shape in shapes]
    outcomes = check._run(orders, 2, "gloo", 10.0, 100)
    assert [outcome.order for outcome in outcomes] == orders
    assert [outcome.verdict for outcome in outcomes] == [
        *(
            Verdict.RIGHT,
            Verdict.ABORTED,
            Verdict.RIGHT,
            Verdict.WRONG,
            Verdict.ABORTED,
            Verdict.RIGHT,
        ),
    ]


def test_one_failure_that_does_not_happen_again_alone_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a cell breaks for those after it is not put down to them."""
    seen: list[str] = []

    def breaks(case: Case) -> str:
        seen.append(case.shape)
        return "broken by another" if seen == ["first", "second"] else ""

    monkeypatch.setattr(check_ranks, "run_ours", breaks)
    orders = [
        Order(Case(collective="x", dtype=torch.int8, shape=shape), HERE)
        for shape in ("first", "second", "third")
    ]
    outcomes = check._run(orders, 2, "gloo", 10.0, 100)
    assert [outcome.verdict for outcome in outcomes] == [Verdict.RIGHT] * 3


def test_raw_torch_is_measured_but_is_no_problem_of_this_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = [case for case in torch_cases(dtypes=[torch.float32]) if case.columns == 3]
    strided = [case for case in raw if case.shape == "strided" and "broadcast" in case.collective]
    monkeypatch.setattr(check, "all_cases", lambda dtypes: [])
    monkeypatch.setattr(check, "MISUSES", ())
    monkeypatch.setattr(check, "torch_cases", lambda *args, **kwargs: strided)
    monkeypatch.setattr(check, "RAW", ["lengths differ", "op differs"])
    report = check_machine(2, raw_dtypes=[torch.float32])
    found = {str(o.order.what): o.verdict for o in report.outcomes if o.order.place == RAW_TORCH}
    assert found["torch.broadcast float32 strided 3 columns"] == Verdict.WRONG
    assert found["lengths differ"] == Verdict.ABORTED
    assert found["op differs"] == Verdict.WRONG
    assert report.problems == []


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="world size 1 must be at least 2"):
        check_machine(1)


def test_mistake_that_hangs_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(at: At) -> None:
        signal.pause()

    monkeypatch.setattr(check, "_CELL_S", 0.5)
    monkeypatch.setitem(
        check_ranks.MISUSE_OF, "hangs", Misuse(name="hangs", run=hang, raised_by=nobody)
    )
    (outcome,) = check._run([Order("hangs", HERE)], 2, "gloo", 10.0, 1)
    assert outcome.verdict == "timed out"
    assert "no answer within 0.5 s" in outcome.detail


_RIGHT = check_ranks.CaseResult(verdict=Verdict.RIGHT)

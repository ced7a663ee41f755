"""Reports of the matrix: problems are listed, and a check that missed a canary says so first."""

import json

import torch

from comm_collectives.checking.cells.problems import Case
from comm_collectives.checking.matrix import CheckReport, Outcome
from comm_collectives.checking.rank_side import BLIND, HERE, RAW_TORCH, WIRE, Order
from comm_collectives.checking.results.results import Verdict
from comm_collectives.checking.table import format_table, to_json

_CELL = Case(collective="all_gather", dtype=torch.int8, shape="even")
_RAW_CELL = Case(collective="torch.all_gather", dtype=torch.int8, shape="even")
_CANARY = Case(collective="all_gather", dtype=torch.int8, shape="even", spoiled="result")


def _report(*outcomes: Outcome) -> CheckReport:
    return CheckReport(num_ranks=2, backend="gloo", elapsed_s=3.0, outcomes=outcomes)


def _outcome(what: Case | str, verdict: str, place: str = HERE, detail: str = "") -> Outcome:
    return Outcome(order=Order(what, place), verdict=verdict, detail=detail)


def test_good_report_has_counts_and_no_problem() -> None:
    report = _report(
        _outcome(_CANARY, Verdict.WRONG),
        _outcome(_CELL, Verdict.RIGHT),
        _outcome("op differs", Verdict.REFUSED),
        _outcome("op differs", Verdict.REFUSED, WIRE),
        _outcome("op differs", Verdict.WRONG, BLIND),
        _outcome("op differs", Verdict.WRONG, RAW_TORCH),
        _outcome(_RAW_CELL, Verdict.REFUSED, RAW_TORCH),
    )
    assert report.problems == []
    assert report.missed_canaries == []
    text = format_table(report)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "all_gather 1 1 - - - - -" in lines
    assert "torch.all_gather 1 - 1 - - - -" in lines
    assert "deliberate mistakes here over the wire torch.distributed" in lines
    assert "op differs refused refused silently wrong" in lines
    assert "PROBLEM" not in text
    assert "comm_collectives: 1 of 1 cells and 2 of 2 mistakes end as they must" in lines
    assert lines[-1] == (
        "torch.distributed: 0 of 1 cells and 0 of 1 mistakes end as they must; "
        "1 silently wrong; 1 refused"
    )


def test_problems_and_missed_canaries_are_printed() -> None:
    report = _report(
        _outcome(_CANARY, Verdict.RIGHT),
        _outcome(_CELL, Verdict.WRONG, detail="rank 1: other values"),
        _outcome("op differs", Verdict.RIGHT, BLIND),
        _outcome("op differs", Verdict.WRONG, WIRE, detail="not a word"),
    )
    assert len(report.problems) == 2
    assert len(report.missed_canaries) == 2
    text = format_table(report)
    assert "PROBLEM all_gather int8 even 3 columns (here): silently wrong: rank 1" in text
    assert "PROBLEM op differs (over the wire): silently wrong: not a word" in text
    assert "PROBLEM the canary op differs (blind) was not found wrong" in text
    assert "comm_collectives: 0 of 1 cells and 0 of 1 mistakes end as they must" in text


def test_json_holds_every_outcome() -> None:
    report = json.loads(
        to_json(_report(_outcome(_CELL, Verdict.RIGHT), _outcome("op differs", Verdict.WRONG)))
    )
    cell, mistake = report["outcomes"]
    assert cell["collective"] == "all_gather"
    assert cell["dtype"] == "int8"
    assert cell["verdict"] == cell["expected"] == "right"
    assert mistake["mistake"] == "op differs"
    assert mistake["expected"] == "refused"
    assert report["problems"] == ["op differs (here): silently wrong: "]

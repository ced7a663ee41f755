"""Reports of the matrix: problems are listed, a blind check is said to be blind."""

import torch

from comm_collectives.check import CheckReport, format_table, merge
from comm_collectives.check_cases import RIGHT, WRONG, Case, CaseResult


def test_wrong_cell_and_blindness_are_printed() -> None:
    case = Case(collective="all_reduce", dtype=torch.float32, shape="even")
    wrong = CaseResult(verdict=WRONG, detail="rank 1: other values")
    text = format_table(CheckReport(num_ranks=2, verdicts=((case, wrong),), is_blind=True))
    assert "PROBLEM all_reduce float32 even: wrong (rank 1: other values)" in text
    assert "PROBLEM the canary" in text
    assert "0 of 1 cells end as they must" in text


def test_merge_returns_the_rank_that_differs() -> None:
    good, bad = CaseResult(verdict=RIGHT), CaseResult(verdict=WRONG, detail="x")
    assert merge(RIGHT, [good, bad]) == CaseResult(verdict=WRONG, detail="rank 1: x")
    assert merge(RIGHT, [good, good]) == good

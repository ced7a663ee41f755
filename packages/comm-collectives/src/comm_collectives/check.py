"""Run the correctness matrix on local ranks and say what is right on this machine.

report = check_machine(2, timeout_s=60)
print(format_table(report))
"""

import json
import platform
from dataclasses import dataclass

import torch

from comm_collectives.check_cases import (
    FAILED,
    REFUSED,
    RIGHT,
    SHAPES,
    WRONG,
    Case,
    CaseResult,
    all_cases,
    expected_verdict,
    run_matrix,
)
from comm_collectives.local_ranks import run_local

_VERDICTS = (RIGHT, REFUSED, WRONG, FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Verdict and first detail of each case over all ranks; `is_blind` if the canary was missed."""

    num_ranks: int
    verdicts: tuple[tuple[Case, CaseResult], ...]
    is_blind: bool

    @property
    def problems(self) -> list[str]:
        """One line for each cell that did not end as it must."""
        return [
            f"{case}: {result.verdict} ({result.detail})"
            for case, result in self.verdicts
            if result.verdict != expected_verdict(case)
        ]


def check_machine(num_ranks: int, *, timeout_s: float) -> CheckReport:
    """Start gloo ranks on this machine and run every cell of the matrix on them.

    Raises:
        ValueError: there are no ranks to start.
        CommError: a rank died or did not finish.
    """
    if num_ranks < 1:
        raise ValueError(f"world size {num_ranks} must be at least 1")
    answers = run_local(f"{__name__}:rank_main", num_ranks, timeout_s=timeout_s)
    by_rank = [[CaseResult(**fields) for fields in json.loads(answer)] for answer in answers]
    cases = all_cases()
    merged = [
        (case, merge(expected_verdict(case), [results[i] for results in by_rank]))
        for i, case in enumerate(cases)
    ]
    canary = merged[0][1]
    return CheckReport(
        num_ranks=num_ranks, verdicts=tuple(merged[1:]), is_blind=canary.verdict != WRONG
    )


def merge(expected: str, results: list[CaseResult]) -> CaseResult:
    """Return the first result that is not as expected, or the first one."""
    for rank, result in enumerate(results):
        if result.verdict != expected:
            return CaseResult(verdict=result.verdict, detail=f"rank {rank}: {result.detail}")
    return results[0]


def rank_main() -> str:
    """Run the matrix on one rank and return the results as JSON."""
    results = run_matrix(all_cases())
    return json.dumps([{"verdict": r.verdict, "detail": r.detail} for r in results])


def format_table(report: CheckReport) -> str:
    """Return the matrix as text: per collective and shape, how many dtypes ended how."""
    lines = [
        f"torch {torch.__version__}, gloo, {report.num_ranks} ranks, "
        f"Python {platform.python_version()} on {platform.machine()}",
        f"{'collective':<22}{'shape':<10}" + "".join(f"{v:>9}" for v in _VERDICTS),
    ]
    for collective in dict.fromkeys(case.collective for case, _ in report.verdicts):
        for shape in SHAPES:
            verdicts = [
                result.verdict
                for case, result in report.verdicts
                if (case.collective, case.shape) == (collective, shape)
            ]
            counts = "".join(f"{verdicts.count(v):>9}" for v in _VERDICTS)
            lines.append(f"{collective:<22}{shape:<10}{counts}")
    lines += [f"PROBLEM {line}" for line in report.problems]
    if report.is_blind:
        lines.append("PROBLEM the canary, whose data is spoiled on purpose, was not noticed")
    good = len(report.verdicts) - len(report.problems)
    lines.append(
        f"{good} of {len(report.verdicts)} cells end as they must; "
        "refused: the dtype has no such arithmetic, the same TypeError on every rank"
    )
    return "\n".join(lines)


def to_json(report: CheckReport) -> str:
    """Return the matrix as JSON, one entry per cell."""
    cells = [
        {
            "collective": case.collective,
            "dtype": str(case.dtype).removeprefix("torch."),
            "shape": case.shape,
            "verdict": result.verdict,
            "expected": expected_verdict(case),
            "detail": result.detail,
        }
        for case, result in report.verdicts
    ]
    return json.dumps({"num_ranks": report.num_ranks, "blind": report.is_blind, "cells": cells})

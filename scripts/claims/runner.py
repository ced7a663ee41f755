"""Run the commands of claims and judge each figure against its limit.

A command is run once, however many claims read from it. It counts as measured only when it exits
with 0 and prints the figure: a JSON line for a benchmark, `N passed` for a test. Of a claim that
does not hold, the end of what its command wrote to its error stream is kept: that names the seeds.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from claims.ledger import Claim

HOLDS = "holds"
FALLS_SHORT = "falls short"
FAILED = "failed"
NOT_HERE = "not measured here (GPU)"
_LAST_LINES = 15
_LAST_ERROR_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one claim: the verdict, and the figure's JSON line when there is one."""

    claim: Claim
    verdict: str
    figure: dict[str, float] = field(default_factory=dict)
    reason: str = ""


def measure(claims: Sequence[Claim], *, root: Path, has_gpu: bool) -> list[Outcome]:
    """Run every command once and judge its claims; GPU claims only where there is a GPU."""
    printed: dict[str, _Printed] = {}
    outcomes = []
    for claim in claims:
        if claim.gpu and not has_gpu:
            outcomes.append(Outcome(claim=claim, verdict=NOT_HERE))
            continue
        if claim.command not in printed:
            print(f"claims: {claim.command}", flush=True)
            printed[claim.command] = _run(claim, root)
        ran = printed[claim.command]
        outcome = judge(claim, ran.figures, ran.failure)
        if outcome.verdict != HOLDS and ran.errors:
            told = f"{outcome.reason}\nits error stream:\n{ran.errors}".lstrip()
            outcome = replace(outcome, reason=told)
        outcomes.append(outcome)
    return outcomes


def judge(claim: Claim, figures: dict[str, dict[str, float]], failure: str) -> Outcome:
    """The verdict on one claim, from the figures its command printed, or why it failed."""
    if failure:
        return Outcome(claim=claim, verdict=FAILED, reason=failure)
    if claim.figure not in figures:
        reason = f"the command printed no figure `{claim.figure}`, only {sorted(figures)}"
        return Outcome(claim=claim, verdict=FAILED, reason=reason)
    figure = figures[claim.figure]
    verdict = HOLDS if claim.holds(figure["value"]) else FALLS_SHORT
    return Outcome(claim=claim, verdict=verdict, figure=figure)


def read_figures(output: str) -> dict[str, dict[str, float]]:
    """The figures in what a benchmark or pytest printed, by name; the last of a name counts."""
    figures: dict[str, dict[str, float]] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(fields, dict) and isinstance(fields.get("figure"), str):
                numbers = {k: float(v) for k, v in fields.items() if isinstance(v, int | float)}
                figures[fields["figure"]] = {"value": math.nan} | numbers
    passed = re.findall(r"\b(\d+) passed\b", output)
    if passed:
        figures.setdefault("passed", {"value": float(passed[-1])})
    return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Printed:
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failure: str = ""
    errors: str = ""


def _run(claim: Claim, root: Path) -> _Printed:
    program, *arguments = shlex.split(claim.command)
    modules = {"python": (), "pytest": ("-m", "pytest", "-q", "-p", "no:cacheprovider")}
    command = [sys.executable, *modules[program], *arguments]
    # A test session's report belongs to that session, not to a run that a claim starts.
    environment = {k: v for k, v in os.environ.items() if k != "TEST_REPORT"}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=claim.timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        errors = (error.stderr or b"").decode(errors="replace")  # bytes, whatever was asked for
        failure = f"still running after {claim.timeout_s} s"
        return _Printed(failure=failure, errors=_tail(errors, _LAST_ERROR_LINES))
    errors = _tail(done.stderr, _LAST_ERROR_LINES)
    if done.returncode != 0:
        failure = f"exit status {done.returncode}\n{_tail(done.stdout, _LAST_LINES)}"
        return _Printed(failure=failure, errors=errors)
    return _Printed(figures=read_figures(done.stdout), errors=errors)


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])

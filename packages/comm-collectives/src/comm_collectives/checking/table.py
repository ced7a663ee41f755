"""The report of `check` as a table to read, and as JSON.

print(format_table(report))
"""

import json
import platform
from collections.abc import Sequence

import torch

from comm_collectives.checking.cells import Case
from comm_collectives.checking.matrix import CheckReport, Outcome
from comm_collectives.checking.rank_side import BLIND, RAW_TORCH
from comm_collectives.checking.results import Verdict

_LEGEND = (
    "right: the known answer, and no input or neighbour touched",
    "refused: the same exception on every rank within a second",
    "failed: not alike on every rank, or its text misses a rank, the call, a line or the argument",
    "aborted: a process ended; timed out: without naming a rank",
)


def format_table(report: CheckReport) -> str:
    """Return the report as text: per collective how many cells ended how, and each mistake."""
    lines = [
        f"torch {torch.__version__}, {report.backend}, {report.num_ranks} ranks, "
        f"Python {platform.python_version()} on {platform.machine()}; "
        f"took {report.elapsed_s:.0f} s"
    ]
    shown = [outcome for outcome in report.outcomes if not outcome.is_canary]
    for place in _places(shown):
        lines += ["", *_cell_lines([o for o in shown if o.order.place == place], place)]
    lines += ["", *_mistake_lines(shown), "", *_LEGEND, ""]
    lines += [f"PROBLEM {line}" for line in report.problems]
    lines += [
        f"PROBLEM the canary {line} was not found wrong, so nothing above counts"
        for line in report.missed_canaries
    ]
    ours = [outcome for outcome in shown if outcome.order.place != RAW_TORCH]
    lines.append(total("comm_collectives", ours))
    raw = [outcome for outcome in shown if outcome.order.place == RAW_TORCH]
    if raw:
        lines.append(total("torch.distributed", raw))
    return "\n".join(lines)


def to_json(report: CheckReport) -> str:
    """Return the report as JSON, one entry per cell or mistake."""
    return json.dumps(
        {
            "num_ranks": report.num_ranks,
            "backend": report.backend,
            "torch": torch.__version__,
            "elapsed_s": report.elapsed_s,
            "problems": report.problems,
            "missed_canaries": report.missed_canaries,
            "outcomes": [_entry(outcome) for outcome in report.outcomes],
        }
    )


def _entry(outcome: Outcome) -> dict[str, object]:
    what = outcome.order.what
    entry: dict[str, object] = {"place": outcome.order.place}
    if isinstance(what, Case):
        entry |= {
            "collective": what.collective,
            "dtype": str(what.dtype).removeprefix("torch."),
            "op": what.op,
            "shape": what.shape,
            "columns": what.columns,
            "async": what.is_async,
            "canary": what.spoiled,
        }
    else:
        entry |= {"mistake": what, "canary": "blind" if outcome.order.place == BLIND else ""}
    return entry | {
        "verdict": outcome.verdict,
        "expected": outcome.expected,
        "detail": outcome.detail,
    }


def _places(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.order.place for outcome in outcomes))


def _cell_lines(outcomes: Sequence[Outcome], place: str) -> list[str]:
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        if isinstance(outcome.order.what, Case):
            rows.setdefault(outcome.order.what.collective, []).append(outcome.verdict)
    title = "torch.distributed as it is" if place == RAW_TORCH else f"calls compared {place}"
    lines = [f"{title:<34}{'cells':>7}" + "".join(f"{verdict:>16}" for verdict in tuple(Verdict))]
    for collective, verdicts in rows.items():
        counts = "".join(f"{verdicts.count(verdict) or '-':>16}" for verdict in tuple(Verdict))
        lines.append(f"{collective:<34}{len(verdicts):>7}{counts}")
    return lines


def _mistake_lines(outcomes: Sequence[Outcome]) -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        if isinstance(outcome.order.what, str):
            rows.setdefault(outcome.order.what, {})[outcome.order.place] = outcome.verdict
    places = _places(outcomes)
    lines = [f"{'deliberate mistakes':<56}" + "".join(f"{place:>20}" for place in places)]
    for name, verdicts in rows.items():
        cells = "".join(f"{verdicts.get(place, '-'):>20}" for place in places)
        lines.append(f"{name:<56}{cells}")
    return lines


def total(who: str, outcomes: Sequence[Outcome]) -> str:
    """Return how many of the outcomes are as they must be, and how the others ended."""
    outcomes = [outcome for outcome in outcomes if not outcome.is_canary]
    cells = [outcome for outcome in outcomes if isinstance(outcome.order.what, Case)]
    mistakes = [outcome for outcome in outcomes if isinstance(outcome.order.what, str)]
    counts = [
        f"{sum(outcome.is_good for outcome in some)} of {len(some)} {what}"
        for some, what in ((cells, "cells"), (mistakes, "mistakes"))
        if some
    ]
    text = f"{who}: {' and '.join(counts)} end as they must"
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    for verdict in (Verdict.WRONG, *(v for v in tuple(Verdict) if v != Verdict.WRONG)):
        count = sum(outcome.verdict == verdict for outcome in bad)
        if count:
            word = "right, which cannot be" if verdict == Verdict.RIGHT else verdict
            text += f"; {count} {word}"
    return text

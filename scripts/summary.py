"""Add up what the test sessions of a nox run left behind, and say it so that failures stand out.

Every session leaves `<session>.json` (written by the root conftest.py, or by the noxfile when the
session ended before its tests did). Invariant: a session without a report, or with no test that
passed, counts as a failure; nothing that did not run can look green.

    python scripts/summary.py lint mesh-spmd seams          # a table, then the failures
    python scripts/summary.py --closing-line lint seams     # its last line alone
    python scripts/summary.py --markdown mesh-spmd          # for the page of a CI job
    python scripts/summary.py --not-run --together all.json gpu-a gpu-b   # of one GPU check
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from workspace import ROOT

REPORTS = ROOT / ".nox" / "reports"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one session did; `failures` names tests and checks."""

    session: str
    passed: int = 0
    skipped: int = 0
    gpu_deselected: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()


def read_report(folder: Path, session: str, *, may_skip: bool = False) -> Report:
    """The report of a session; a missing or unreadable one is itself a failure.

    Args:
        may_skip: whether a session may have skipped all its tests.
    """
    file = folder / f"{session}.json"
    try:
        fields = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return Report(session=session, failures=("ended before its tests did",))
    failures = list(fields.get("failures", ())) + list(fields.get("failed_checks", ()))
    passed = int(fields.get("passed", 0))
    skipped_all = may_skip and passed == 0 and bool(fields.get("not_run"))
    if not failures and passed == 0 and not skipped_all:
        failures.append("no test passed")
    if not failures and not skipped_all and fields.get("exit_status", 1) != 0:
        failures.append(f"pytest ended with exit status {fields.get('exit_status')}")
    return Report(
        session=session,
        passed=passed,
        skipped=int(fields.get("skipped", 0)) + int(fields.get("xfailed", 0)),
        gpu_deselected=int(fields.get("gpu_deselected", 0)),
        seconds=float(fields.get("seconds", 0.0)),
        failures=tuple(failures),
        not_run=tuple(fields.get("not_run", ())),
    )


def write_together(reports: list[Report], file: Path) -> None:
    """Leave the sum of several reports as one."""
    fields = {
        "passed": sum(r.passed for r in reports),
        "skipped": sum(r.skipped for r in reports),
        "seconds": round(sum(r.seconds for r in reports), 1),
        "failures": [name for r in reports for name in r.failures],
        "not_run": [name for r in reports for name in r.not_run],
    }
    file.write_text(json.dumps(fields))


def closing_line(reports: list[Report]) -> str:
    """The sum over all sessions as `N passed, N failed`."""
    passed = sum(r.passed for r in reports)
    return f"{passed} passed, {sum(len(r.failures) for r in reports)} failed"


def table(reports: list[Report], *, markdown: bool) -> str:
    """One row a session, then the failures by name."""
    header = ("session", "passed", "failed", "skipped", "gpu only", "seconds")
    rows = [
        (
            r.session,
            str(r.passed),
            str(len(r.failures)),
            str(r.skipped),
            str(r.gpu_deselected),
            f"{r.seconds:.0f}",
        )
        for r in reports
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    edge = "|" if markdown else ""
    lines = [_line(row, widths, edge) for row in [header, *rows]]
    lines.insert(1, _line(tuple("-" * w for w in widths), widths, edge))
    failures = [f"{r.session}: {name}" for r in reports for name in r.failures]
    if failures:
        lines += ["", "Failures:", *([""] if markdown else []), *(f"- {name}" for name in failures)]
    return "\n".join(lines)


def _line(row: tuple[str, ...], widths: list[int], edge: str) -> str:
    cells = [
        cell.ljust(w) if i == 0 else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]
    return f"{edge} {f' {edge} '.join(cells)} {edge}".rstrip()


def main() -> int:
    """Print the summary; non-zero when anything failed or nothing passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "sessions", nargs="*", help="sessions whose reports are expected; those present without"
    )
    parser.add_argument("--reports", type=Path, default=REPORTS, help="folder of the reports")
    parser.add_argument("--closing-line", action="store_true", help="print the last line alone")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--not-run", action="store_true", help="name what was skipped, and why")
    parser.add_argument("--together", type=Path, help="write the sum as one report to this file")
    arguments = parser.parse_args()
    present = sorted(file.stem for file in arguments.reports.glob("*.json"))
    sessions = arguments.sessions or present
    reports = [
        read_report(arguments.reports, session, may_skip=arguments.not_run) for session in sessions
    ]
    if arguments.together is not None:
        write_together(reports, arguments.together)
    if not arguments.closing_line:
        print(table(reports, markdown=arguments.markdown), end="\n\n")
    if arguments.not_run:
        not_run = [name for report in reports for name in report.not_run]
        print(f"Not run: {len(not_run)}", *(f"- {name}" for name in not_run), sep="\n")
    print(closing_line(reports))
    passed = any(r.passed for r in reports)
    return 0 if passed and not any(r.failures for r in reports) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Shared by every test run: a report that nox adds up, and settings for hypothesis.

With TEST_REPORT=<file> in the environment a run leaves its counts and the names of what failed in
that file as JSON; `scripts/summary.py` adds the files up.
"""

import json
import os
import time
from pathlib import Path

import pytest

try:
    import hypothesis
except ModuleNotFoundError:  # scripts/gpu_check.sh runs where it may be missing
    pass
else:
    # No deadline: a shared machine stalls at any moment, and a time limit would find only that.
    hypothesis.settings.register_profile("repository", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("repository")

# Taken out of the environment, so that a pytest started by a test leaves this run's report alone.
_REPORT = os.environ.pop("TEST_REPORT", None)
_STARTED_AT = time.monotonic()
_gpu_deselected: list[str] = []


def pytest_deselected(items: list[pytest.Item]) -> None:
    _gpu_deselected.extend(item.nodeid for item in items if item.get_closest_marker("gpu"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under pytest-xdist only the workers see the tests; each tells the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_deselected"] = list(_gpu_deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    told = getattr(node, "workeroutput", {}).get("gpu_deselected", [])
    _gpu_deselected.extend(item for item in told if item not in _gpu_deselected)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if _gpu_deselected:
        terminalreporter.write_line(f"{len(_gpu_deselected)} gpu tests deselected")
    if _REPORT is None:
        return
    stats = terminalreporter.stats
    report = {kind: len(stats.get(kind, [])) for kind in ("passed", "skipped", "xfailed")}
    failures = [f"{r.nodeid} ({kind})" for kind in ("failed", "error") for r in stats.get(kind, [])]
    Path(_REPORT).write_text(
        json.dumps(
            report
            | {
                "failures": failures,
                "gpu_deselected": len(_gpu_deselected),
                "exit_status": int(exitstatus),
                "seconds": round(time.monotonic() - _STARTED_AT, 1),
            }
        )
    )

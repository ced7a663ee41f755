"""Shared by every test run: a report that nox adds up, and settings for hypothesis.

With TEST_REPORT=<file> in the environment a run leaves its counts and the names of what failed in
that file as JSON; `scripts/summary.py` adds the files up.
"""

import gc
import json
import os
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from devicetest import Machine

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
# Functions that refuse tensors of a subclass, which those of devicetest are.
_SUBCLASS_CHECKS = (("unified_ckpt.geometry.shard", "_check_tensor"),)
_gpu_deselected: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-devicetest",
        action="store_true",
        help="run the tests marked `gpu` on devices made of CPU memory (testing/devicetest)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On devicetest only GPU tests run, of which each names what devicetest cannot do for it."""
    if not config.getoption("--on-devicetest"):
        return
    for item in items:
        for marker in item.iter_markers("gpu"):
            if marker.args or not all(marker.kwargs.values()) or set(marker.kwargs) - {"needs"}:
                raise pytest.UsageError(
                    f"{item.nodeid}: write gpu, or gpu(needs='what is missing')"
                )
            if "needs" in marker.kwargs:
                reason = f"devicetest has no {marker.kwargs['needs']}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _devices(request: pytest.FixtureRequest) -> Iterator["Machine | None"]:
    """Two devices of devicetest, if it is asked for."""
    if not request.config.getoption("--on-devicetest"):
        yield None
        return
    from devicetest import fake_cuda  # noqa: PLC0415 - not everywhere where tests run

    checks = [
        (import_module(m), name) for m, name in _SUBCLASS_CHECKS if find_spec(m.split(".")[0])
    ]
    with fake_cuda(devices=2, unchecked=checks) as machine:
        gc.collect()
        gc.freeze()  # what is collected after each test is what tests have made, not torch
        yield machine


@pytest.fixture(autouse=True)
def _no_faults_of_devices(_devices: "Machine | None") -> Iterator[None]:
    """On devicetest a test must leave no race and no other fault."""
    yield
    if _devices is not None:
        gc.collect()  # so that the next test does not see this one's memory go
        found = _devices.found.all()  # of forked ranks too
        _devices.forget()
        if found:
            pytest.fail("\n".join(["found by devicetest:", *found]))


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
                "not_run": [_reason(r) for r in stats.get("skipped", [])],
                "gpu_deselected": len(_gpu_deselected),
                "exit_status": int(exitstatus),
                "seconds": round(time.monotonic() - _STARTED_AT, 1),
            }
        )
    )


def _reason(report: pytest.TestReport) -> str:
    """A test, or a file, that was skipped and why."""
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return f"{report.nodeid}: {why.removeprefix('Skipped: ')}"

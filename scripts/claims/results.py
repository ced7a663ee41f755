"""benchmarks/results/<name>.json: what was measured, on what, with which versions.

A result tells enough to judge and repeat it, and nothing that identifies the machine: no host
name, no user, no path. A run of some of a package's claims keeps the others' earlier results, each
with its own date; every figure is a ratio or a count taken within one run.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.runner import FAILED, NOT_HERE, Outcome
from workspace import ROOT, read_packages

RESULTS = ROOT / "benchmarks" / "results"
_LIBRARIES = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "tokenizers",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def write_results(
    file: Path, outcomes: Sequence[Outcome], *, tests: dict[str, object] | None = None
) -> None:
    """Merge the outcomes into the file's results; failures and what was not measured are left out.

    A claim that failed to run loses its earlier result, which no longer holds. `tests` is the
    report of a test run on the same machine (the GPU tests), kept beside the figures.
    """
    kept = {entry["id"]: entry for entry in _read(file)}
    for outcome in outcomes:
        if outcome.verdict == FAILED:
            kept.pop(outcome.claim.id, None)
        elif outcome.verdict != NOT_HERE:
            kept[outcome.claim.id] = _entry(outcome)
    if not kept and tests is None:
        file.unlink(missing_ok=True)
        return
    results: dict[str, object] = {
        "machine": describe_machine(),
        "versions": versions(),
        "claims": [kept[key] for key in sorted(kept)],
    }
    if tests is not None:
        results["tests"] = tests
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")


def read_entries(folder: Path) -> dict[str, dict[str, object]]:
    """Every result in the folder by claim id, each with its file's `machine` and `versions`."""
    entries: dict[str, dict[str, object]] = {}
    for file in sorted(folder.glob("*.json")):
        fields = json.loads(file.read_text())
        for entry in fields["claims"]:
            entries[entry["id"]] = entry | {
                "machine": fields["machine"],
                "versions": fields["versions"],
            }
    return entries


def describe_machine() -> dict[str, object]:
    """The kind of machine: processor, cores usable, memory, operating system, GPU."""
    machine: dict[str, object] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }
    gpu = gpu_name()
    return machine | ({"gpu": gpu} if gpu else {})


@functools.cache
def gpu_name() -> str | None:
    """The name that torch gives to the first CUDA device, None without one.

    Asked in another process: the claims program itself stays free of torch and of the device.
    """
    code = "import torch as t; print(t.cuda.get_device_name(0) if t.cuda.is_available() else '')"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def versions() -> dict[str, str]:
    """Versions of Python, of the libraries measured with or against, and of our packages."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {p.name: p.version for p in read_packages()}


def _entry(outcome: Outcome) -> dict[str, object]:
    claim = outcome.claim
    spread = {k: v for k, v in outcome.figure.items() if k in ("value", "low", "high", "n")}
    return {
        "id": claim.id,
        "figure": claim.figure,
        **spread,
        "unit": claim.unit,
        "limit": claim.limit,
        "peer": claim.peer,
        "verdict": outcome.verdict,
        "date": datetime.date.today().isoformat(),
    }


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    entries: list[dict[str, Any]] = json.loads(file.read_text())["claims"]
    return entries


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Which sessions the test command runs, and that one for each package proves its wheel alone."""

import json
import subprocess
import sys

import pytest

from workspace import ROOT, read_packages

PACKAGES = [p.name for p in read_packages()]


@pytest.fixture(scope="module")
def sessions() -> dict[str, bool]:
    """Every session by name: whether `uv run nox` runs it."""
    command = [sys.executable, "-m", "nox", "--list-sessions", "--json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    chosen = {entry["session"] for entry in json.loads(listed.stdout)}
    text = subprocess.run([*command[:-1]], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.split()[1] for line in text.stdout.splitlines() if line.startswith(("* ", "- "))]
    return {name: name in chosen for name in names}


def test_the_test_command_runs_lint_every_package_seams_end_to_end_and_device(
    sessions: dict[str, bool],
) -> None:
    default = [name for name, chosen in sessions.items() if chosen]
    assert default == ["lint", *PACKAGES, "seams", "end_to_end", "device", "summary"]


def test_what_needs_a_gpu_time_or_the_network_runs_by_name_only(sessions: dict[str, bool]) -> None:
    by_name = {name.split("(")[0] for name, chosen in sessions.items() if not chosen}
    assert by_name == {"claims", "gpu", "oldest"}

"""What README.md and .ci/run promise: the two commands, a tour that is complete."""

import re
import subprocess

from workspace import ROOT

TEST_COMMAND = "uv run nox"
TRAIN_COMMAND = "uv run moe-train train examples/python_stdlib.toml"


def test_the_two_commands_stand_at_the_top_of_the_readme() -> None:
    top = (ROOT / "README.md").read_text().splitlines()[:40]
    code = [line.split("#")[0].strip() for line in top]
    assert TRAIN_COMMAND in code
    assert TEST_COMMAND in code


def test_the_configuration_that_the_readme_trains_is_there() -> None:
    assert (ROOT / TRAIN_COMMAND.split()[-1]).is_file()


def test_the_tour_has_one_line_for_every_folder() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {name.split("/")[0] for name in listed.stdout.splitlines() if "/" in name}
    lines = (ROOT / "README.md").read_text().splitlines()
    for folder in sorted(folders - {".ci"}):
        entry = re.compile(rf"^\W*`?{re.escape(folder)}/")
        assert sum(bool(entry.match(line)) for line in lines) == 1, f"README tour: {folder}/"


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert any(line.startswith(TEST_COMMAND) for line in lines)
    assert "scripts/summary.py --closing-line" in (ROOT / ".ci/run").read_text()


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text

"""The linters of workflows fail on a bad sample; and what no linter knows of ours is held here."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from workspace import ROOT, read_packages

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = Path(sysconfig.get_path("scripts"))
INJECTION = """\
name: bad
on: pull_request_target
permissions: write-all
jobs:
  bad:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@v4
      - run: echo "${{ github.event.pull_request.title }}"
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    program = str(SCRIPTS / command[0])
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)


def test_zizmor_fails_on_an_unsafe_workflow(tmp_path: Path) -> None:
    file = tmp_path / "bad.yml"
    file.write_text(INJECTION)
    done = run("zizmor", "--offline", "--no-progress", str(file))
    assert done.returncode != 0
    assert "template-injection" in done.stdout and "unpinned-uses" in done.stdout


def test_check_jsonschema_fails_on_a_malformed_workflow(tmp_path: Path) -> None:
    file = tmp_path / "bad.yml"
    file.write_text("name: bad\non: push\njobs:\n  x:\n    steps: hello\n")
    done = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(file))
    assert done.returncode != 0


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda f: f.stem)
def test_every_workflow_grants_nothing_by_default_and_pins_its_actions(file: Path) -> None:
    text = file.read_text()
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    assert re.search(r"^concurrency:$", text, re.MULTILINE)
    uses = re.findall(r"uses: (\S+)( # v[0-9.]+)?", text)
    assert uses
    for action, version in uses:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) and version, action
    jobs = text[text.index("\njobs:") :]
    assert jobs.count("runs-on:") == jobs.count("timeout-minutes:")
    assert jobs.count("actions/checkout@") == jobs.count("persist-credentials: false")


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda f: f.stem)
def test_every_workflow_always_uploads_its_logs_and_writes_a_summary(file: Path) -> None:
    text = file.read_text()
    assert "GITHUB_STEP_SUMMARY" in text
    assert re.search(r"upload-artifact@\S+ # \S+\n\s+if: always\(\)", text)


def test_an_action_is_pinned_to_the_same_commit_everywhere() -> None:
    pins: dict[str, set[str]] = {}
    for file in WORKFLOWS:
        for action, commit in re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40})", file.read_text()):
            pins.setdefault(action, set()).add(commit)
    assert all(len(commits) == 1 for commits in pins.values()), pins


def test_the_gpu_workflow_never_runs_for_a_pull_request() -> None:
    text = (ROOT / ".github/workflows/gpu.yml").read_text()
    triggers = text[text.index("\non:") : text.index("\npermissions:")]
    assert "pull_request" not in triggers and "workflow_run" not in triggers
    assert re.findall(r"^  (\w+):", triggers, re.MULTILINE) == [
        "push",
        "schedule",
        "workflow_dispatch",
    ]
    # Only runners that the repository names, so that no job waits for one that does not exist.
    assert "vars.GPU_RUNNERS != ''" in text and "fromJSON(vars.GPU_RUNNERS" in text
    assert 'runs-on: [self-hosted, linux, x64, "${{ matrix.runner }}"]' in text


def test_the_oldest_torch_runs_on_both_pythons_nightly_and_when_an_adapter_changes() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    job = text[text.index("\n  oldest:") : text.index("\n  done:")]
    assert 'python: ["3.11", "3.12"]' in job and "github.event_name == 'schedule'" in job
    assert "needs.changes.outputs.adapters == 'true'" in job
    gpu = (ROOT / ".github/workflows/gpu.yml").read_text()
    assert 'python: "3.12"\n            torch: torch==2.11.*' in gpu


def test_the_gpu_workflow_validates_wheels_and_gpu_before_it_tests() -> None:
    text = (ROOT / ".github/workflows/gpu.yml").read_text()
    steps = ("check_gpu.py", "check_install.py", "gpu_check.sh --installed")
    order = [text.index(step) for step in steps]
    assert order == sorted(order)
    for package in read_packages():
        assert re.search(rf"\b{package.import_name}\b", text), package.name


def test_a_self_hosted_runner_appears_in_the_gpu_workflow_alone() -> None:
    assert [f.name for f in WORKFLOWS if "self-hosted" in f.read_text()] == ["gpu.yml"]

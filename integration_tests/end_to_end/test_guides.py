"""The guides' commands, run as they stand in an empty folder; both languages have the same.

SLURM is a stub here: `sbatch` runs the script, `srun` starts its tasks as plain processes.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT

FOLDER = ROOT / "docs" / "guides"
GUIDES = sorted(path.stem for path in FOLDER.glob("*.md") if path.suffixes == [".md"])
BLOCK = re.compile(r"^```bash([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STUBS = {
    "sbatch": """
        import os, re, subprocess, sys
        tasks = re.search(r"--ntasks=(\\d+)", open(sys.argv[1]).read())[1]
        # A batch script has the variables of its allocation, and some of a task.
        env = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": tasks, "SLURM_PROCID": "0"}
        sys.exit(subprocess.run(["bash", sys.argv[1]], env={**os.environ, **env}).returncode)
    """,
    "srun": """
        import os, subprocess, sys
        tasks = int(os.environ["SLURM_NTASKS"])
        common = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_NODELIST": f"node[1-{tasks}]",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{tasks})",
            "MASTER_ADDR": "127.0.0.1",
        }
        command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
        started = []
        for task in range(tasks):
            own = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "SLURM_LOCALID": "0"}
            started.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
        sys.exit(max(process.wait() for process in started))
    """,
    "scontrol": "raise SystemExit('no job was stopped here')",
}


def blocks(guide: str, ending: str) -> list[tuple[str, str]]:
    """What stands behind "bash" at each block, and the commands."""
    text = (FOLDER / f"{guide}{ending}").read_text(encoding="utf-8")
    return [(where.strip(), commands) for where, commands in BLOCK.findall(text)]


def without_comments(commands: str) -> list[str]:
    return [re.sub(r"\s+# .*", "", line) for line in commands.splitlines()]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty folder beside the examples, the stubs in front of everything else."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, body in STUBS.items():
        lines = [line.removeprefix(" " * 8) for line in body.splitlines()]
        (stubs / name).write_text(f"#!{sys.executable}\n" + "\n".join(lines))
        (stubs / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    path = [str(stubs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "FIRST_HOST": "127.0.0.1",
        "PWD": str(work),
    }


@pytest.mark.parametrize("guide", GUIDES)
def test_both_languages_have_the_same_commands_and_links(guide: str) -> None:
    english, chinese = (
        [(where, without_comments(text)) for where, text in blocks(guide, ending)]
        for ending in (".md", ".zh.md")
    )
    assert english == chinese and english
    pages = [ROOT / "README.md", ROOT / "packages" / "moe-train" / "README.md"]
    for page in pages:
        assert f"docs/guides/{guide}.md" in page.read_text(), f"{page} does not link the guide"


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(guide: str, environment: dict[str, str]) -> None:
    work = Path(environment["PWD"])
    for where, commands in blocks(guide, ".md"):
        machines = ("0", "1") if where == "each-machine" else ("0",)
        started = [
            subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", commands],
                cwd=work,
                env={**environment, "NODE_RANK": machine},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for machine in machines
        ]
        for process in started:
            output = process.communicate(timeout=600)[0]
            assert process.returncode == 0, f"{commands}\n{output}"
            # Where one machine's torchrun ends first, that of the other says that it is gone.
            own = re.sub(r"^E\d{4} .*torch/distributed/elastic/.*$", "", output, flags=re.M)
            assert "Traceback" not in own and "moe-train: " not in own, output
    for record in work.rglob("run.json"):
        starts = json.loads(record.read_text())["starts"]
        assert {entry["exit_reason"] for entry in starts} == {"finished"}
